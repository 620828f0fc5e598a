"""Apply a run's transform to samples: channels, scaling, cropping and normalisation, the same on every machine.

8-bit pictures are resized as bytes, with Pillow's integer arithmetic, whether they come from files or as multiples of
1/255 from arrays, so the same picture gives the same numbers everywhere.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError
from subfleet.protocol.transform import DataTransform
from subfleet.tasks.dataset import Dataset, Inputs
from subfleet.tasks.pictures import MAX_BYTE, load_pillow

Floats = npt.NDArray[np.float32]
Pixels = npt.NDArray[Any]
"""Bytes or float32."""

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue in gray (ITU-R BT.601), as in Pillow."""


def transform_dataset(dataset: Dataset, transform: DataTransform, source: str) -> Dataset:
    """Transform the inputs of a data set; the original stays unchanged.

    Args:
        dataset: the data set that was read.
        transform: transform of each sample.
        source: name of the data in error messages.

    Raises:
        DataError: the samples are not pictures, or too small.
        MissingExtraError: Pillow, which resizes pictures, is not installed.
    """
    if dataset.inputs.dtype != np.float32:
        raise DataError(f"samples of {source!r} are indices, but the run's data.transform is for pictures")
    try:
        shape = transform.shape_of(dataset.sample_shape)
    except ValueError as error:
        raise DataError(f"samples of {source!r} do not fit the run's data.transform: {error}") from error
    inputs = np.empty((len(dataset), *shape), np.float32)
    for sample, result in zip(dataset.inputs, inputs, strict=True):
        pixels = sample[np.newaxis] if sample.ndim == 2 else sample
        result[...] = _scale_to_floats(prepare_picture(_recover_bytes(pixels), transform)).reshape(shape)
    normalise_in_place(inputs, transform)
    return replace(dataset, inputs=inputs, transform=transform)


def prepare_picture(pixels: Pixels, transform: DataTransform) -> Pixels:
    """Convert the channels of one picture (channels, height, width), resize and crop it; values keep their scale.

    Args:
        pixels: bytes or float32.
        transform: a transform that accepts this shape.
    """
    pixels = _convert_channels(pixels, transform.channels)
    scaled = transform.compute_scaled_size(*pixels.shape[1:])
    if scaled != pixels.shape[1:]:
        pixels = np.stack([_resize(plane, scaled) for plane in pixels])
    height, width = transform.cut_size(scaled)
    top, left = (scaled[0] - height) // 2, (scaled[1] - width) // 2
    return pixels[:, top : top + height, left : left + width]


def normalise_in_place(inputs: Floats, transform: DataTransform) -> None:
    """Subtract the mean from samples (samples, ...) scaled to 0 to 1, and divide by the deviation."""
    if transform.mean:
        inputs -= _reshape_by_channel(transform.mean)
        inputs /= _reshape_by_channel(transform.deviation)


def undo_normalisation(inputs: Inputs, transform: DataTransform | None) -> Inputs:
    """The samples before normalisation."""
    if transform is None or not transform.mean:
        return inputs
    values = np.asarray(inputs, np.float32)
    result: Floats = values * _reshape_by_channel(transform.deviation) + _reshape_by_channel(transform.mean)
    return result


def _reshape_by_channel(values: tuple[float, ...]) -> Floats:
    numbers = np.array(values, np.float32)
    return numbers if len(values) == 1 else numbers[:, np.newaxis, np.newaxis]


def _convert_channels(pixels: Pixels, channels: int) -> Pixels:
    if channels in (0, len(pixels)):
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=0)
    if pixels.dtype == np.uint8:
        gray = load_pillow().fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, 2))).convert("L")
        return np.asarray(gray, np.uint8)[np.newaxis]
    return np.tensordot(_LUMA, pixels, 1)[np.newaxis].astype(np.float32)


def _resize(plane: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize with a bilinear filter as wide as one result pixel in the source, so no source pixel is skipped."""
    pillow = load_pillow()
    scaled = pillow.fromarray(np.ascontiguousarray(plane)).resize((size[1], size[0]), pillow.Resampling.BILINEAR)
    result: Pixels = np.asarray(scaled, plane.dtype)
    return result


def _recover_bytes(pixels: Floats) -> Pixels:
    """Recover bytes from multiples of 1/255; other numbers stay unchanged."""
    whole: Floats = np.rint(pixels * np.float32(MAX_BYTE))
    if whole.min() < 0 or whole.max() > MAX_BYTE or (whole / np.float32(MAX_BYTE) != pixels).any():
        return pixels
    return whole.astype(np.uint8)


def _scale_to_floats(pixels: Pixels) -> Floats:
    values: Floats = pixels.astype(np.float32)
    if pixels.dtype == np.uint8:
        values /= np.float32(MAX_BYTE)
    return values
