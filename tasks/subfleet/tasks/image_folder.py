"""A folder of images by class: each class is a folder, and its name is that of the class.

A model maps classes by these names. By themselves they are numbered in their natural order, "2" before "10".
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.class_names import check_class_names, in_natural_order
from subfleet.protocol.errors import DataError, FileError, MissingExtraError
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.shaping import shape_problem

__all__ = ["CHANNEL_COUNTS", "MAX_IMAGE_PIXELS", "read_image_folder"]

CHANNEL_COUNTS = (1, 3)
"""Every picture can be given in gray and in colour."""

MAX_IMAGE_PIXELS = 2**24
"""Pixels of one image, checked from its header before anything is decoded."""
_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_GRAY_MODES = frozenset({"1", "L", "LA"})
_COLOUR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"})
_MAX_BYTE = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    path: Path
    label: int
    width: int
    height: int
    gray: bool


def read_image_folder(folder: Path, taken: tuple[int, ...] | None = None) -> Dataset:
    """Read every image below the class folders, scaled to 0 to 1, channels first.

    Transparency is dropped. Files with other endings than an image's are passed over. Class folders may be empty.

    Args:
        folder: with a folder for each class.
        taken: shape of one sample as a model takes it, which decides whether pictures become gray or coloured. Without
            one they become what most of them are, and gray where as many are coloured.

    Raises:
        FileError: a folder cannot be read.
        DataError: there is no image, or one is unreadable, too large, of more than 8 bits, or of another size; or a
            folder's name cannot be that of a class.
        MissingExtraError: Pillow is not installed.
    """
    names, images = _list_images(folder)
    headers = [_read_header(path, label) for path, label in images]
    width, height = _size_of(headers)
    channels = _channels(headers, (height, width), taken, folder)
    try:
        inputs = np.empty((len(headers), channels, height, width), np.float32)
    except MemoryError as error:
        raise DataError(f"data folder {str(folder)!r} is too large for memory; use fewer or smaller images") from error
    for row, header in enumerate(headers):
        pixels = _read_pixels(header.path, "L" if channels == 1 else "RGB")
        inputs[row] = np.moveaxis(pixels.reshape(height, width, channels), 2, 0)
    inputs /= np.float32(_MAX_BYTE)
    labels = np.array([header.label for header in headers], np.int64)
    return Dataset(inputs=inputs, labels=labels, class_names=names)


def _size_of(headers: Sequence[_Header]) -> tuple[int, int]:
    """The size that all images have."""
    sizes = Counter((header.width, header.height) for header in headers)
    (width, height), _ = max(sizes.items(), key=lambda item: (item[1], item[0]))
    odd = next((header for header in headers if (header.width, header.height) != (width, height)), None)
    if odd is not None:
        raise DataError(
            f"image {str(odd.path)!r} is {odd.width} x {odd.height}, but must be {width} x {height} like "
            f"{sizes[width, height]} of {len(headers)} images; scale all images to one size"
        )
    return width, height


def _channels(headers: Sequence[_Header], size: tuple[int, int], taken: tuple[int, ...] | None, folder: Path) -> int:
    """As many as a model takes; without one, as most pictures have."""
    usual = 1 if 2 * sum(header.gray for header in headers) >= len(headers) else 3
    if taken is None:
        return usual
    fitting = [channels for channels in CHANNEL_COUNTS if not shape_problem((channels, *size), taken)]
    if not fitting:
        raise DataError(
            f"images of {str(folder)!r} {shape_problem((usual, *size), taken)}; scale them to the model's size"
        )
    return fitting[0]


def _list_images(folder: Path) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Names of the classes in their order, and each image with its class."""
    try:
        entries = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        # Some file systems write an accent as a character of its own.
        normal = {entry: unicodedata.normalize("NFC", entry.name) for entry in entries}
        names = in_natural_order(normal.values())
        check_class_names(names)
        folders = {name: entry for entry, name in normal.items()}
        images = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted(folders[name].iterdir())
            if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
        ]
    except OSError as error:
        raise FileError(f"data folder {str(folder)!r} cannot be read ({error}); check its permissions") from error
    except ValueError as error:
        raise DataError(f"the class folders of {str(folder)!r} cannot be told by their names: {error}") from error
    if not images:
        raise DataError(
            f"data folder {str(folder)!r} has {len(names)} class folders and no image; "
            "put the images of each class into a folder with the class's name"
        )
    return names, images


def _read_header(path: Path, label: int) -> _Header:
    with _open(path) as image:
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise DataError(
                f"image {str(path)!r} has {width * height} pixels, but may have {MAX_IMAGE_PIXELS}; scale it down"
            )
        if image.mode not in _GRAY_MODES | _COLOUR_MODES:
            raise DataError(f"image {str(path)!r} is of mode {image.mode}, but must have 8 bits a channel; convert it")
        return _Header(path=path, label=label, width=width, height=height, gray=image.mode in _GRAY_MODES)


def _read_pixels(path: Path, mode: str) -> npt.NDArray[np.uint8]:
    with _open(path) as image:
        try:
            return np.asarray(image.convert(mode), np.uint8)
        # Decoders raise whatever their format's parser stumbles over: OSError, SyntaxError, ValueError, IndexError ...
        except Exception as error:
            raise DataError(f"image {str(path)!r} cannot be decoded ({error}); replace or remove it") from error


def _open(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", "edge") from error
    try:
        return Image.open(path)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"image {str(path)!r} is too large to decode ({error}); scale it down") from error
    # Image.open reads the header with the format's own parser, which may raise nearly anything on broken files.
    except Exception as error:
        raise DataError(f"image {str(path)!r} cannot be read ({error}); replace or remove it") from error
