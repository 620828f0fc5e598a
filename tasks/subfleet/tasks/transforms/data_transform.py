"""What a run's transform does to samples: channels, scaling, cutting and normalisation, the same on every machine.

Pictures of 8 bits are scaled as such, by Pillow's whole numbers, whether they come from files or as shares of 255 in
arrays; so the same picture becomes the same numbers wherever it is prepared.
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
"""Bytes, or float32."""

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
"""Shares of red, green and blue in gray (ITU-R BT.601), as Pillow has them."""


def transform_dataset(dataset: Dataset, transform: DataTransform, source: str) -> Dataset:
    """A data set with its inputs transformed; what was read stays as it is.

    Args:
        dataset: as it was read.
        transform: what is done to each of its samples.
        source: of the data, for the error's text.

    Raises:
        DataError: the samples are no pictures, or too small.
        MissingExtraError: Pillow is not installed, which scales them.
    """
    if dataset.inputs.dtype != np.float32:
        raise DataError(f"samples of {source!r} are indices, but the run's data.transform is for pictures")
    try:
        shape = transform.shape_of(dataset.sample_shape)
    except ValueError as error:
        raise DataError(f"samples of {source!r} cannot be brought to the run's data.transform: {error}") from error
    inputs = np.empty((len(dataset), *shape), np.float32)
    for given, made in zip(dataset.inputs, inputs, strict=True):
        pixels = given[np.newaxis] if given.ndim == 2 else given
        made[...] = _scale_to_floats(prepare_picture(_recover_bytes(pixels), transform)).reshape(shape)
    normalise_in_place(inputs, transform)
    return replace(dataset, inputs=inputs, transform=transform)


def prepare_picture(pixels: Pixels, transform: DataTransform) -> Pixels:
    """One picture (channels, height, width) with its channels, size and cut; numbers keep their scale.

    Args:
        pixels: bytes, or float32.
        transform: which accepts this shape.
    """
    pixels = _convert_channels(pixels, transform.channels)
    scaled = transform.compute_scaled_size(*pixels.shape[1:])
    if scaled != pixels.shape[1:]:
        pixels = np.stack([_resize(plane, scaled) for plane in pixels])
    height, width = transform.cut_size(scaled)
    top, left = (scaled[0] - height) // 2, (scaled[1] - width) // 2
    return pixels[:, top : top + height, left : left + width]


def normalise_in_place(inputs: Floats, transform: DataTransform) -> None:
    """Take the mean off samples (samples, ...) on the scale of 0 to 1, and divide them by the deviation."""
    if transform.mean:
        inputs -= _by_channel(transform.mean)
        inputs /= _by_channel(transform.deviation)


def undo_normalisation(inputs: Inputs, transform: DataTransform | None) -> Inputs:
    """Samples as they were before they were normalised."""
    if transform is None or not transform.mean:
        return inputs
    values = np.asarray(inputs, np.float32)
    result: Floats = values * _by_channel(transform.deviation) + _by_channel(transform.mean)
    return result


def _by_channel(values: tuple[float, ...]) -> Floats:
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
    """Bilinear, over as many pixels as one of the result stands for, so that nothing is passed over."""
    pillow = load_pillow()
    scaled = pillow.fromarray(np.ascontiguousarray(plane)).resize((size[1], size[0]), pillow.Resampling.BILINEAR)
    result: Pixels = np.asarray(scaled, plane.dtype)
    return result


def _recover_bytes(pixels: Floats) -> Pixels:
    """Shares of 255 as the bytes that they were made of; other numbers as they are."""
    whole: Floats = np.rint(pixels * np.float32(MAX_BYTE))
    if whole.min() < 0 or whole.max() > MAX_BYTE or (whole / np.float32(MAX_BYTE) != pixels).any():
        return pixels
    return whole.astype(np.uint8)


def _scale_to_floats(pixels: Pixels) -> Floats:
    values: Floats = pixels.astype(np.float32)
    if pixels.dtype == np.uint8:
        values /= np.float32(MAX_BYTE)
    return values
