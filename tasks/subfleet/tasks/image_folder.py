"""A folder of images by class: each class is a folder, and the classes are numbered in the order of their names.

A class folder may be empty: a device that lacks a class keeps its folder, so that all devices number classes alike.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError, FileError, MissingExtraError
from subfleet.tasks.dataset import Dataset

__all__ = ["MAX_IMAGE_PIXELS", "read_image_folder"]

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


def read_image_folder(folder: Path) -> Dataset:
    """Read every image below the class folders, scaled to 0 to 1, channels first.

    One colour image makes all of them RGB; otherwise there is one gray channel. Transparency is dropped. Files with
    other endings than an image's are passed over.

    Raises:
        FileError: a folder cannot be read.
        DataError: there is no image, or one is unreadable, too large, of more than 8 bits, or of another size.
        MissingExtraError: Pillow is not installed.
    """
    headers = [_read_header(path, label) for path, label in _list_images(folder)]
    first = headers[0]
    for header in headers:
        if (header.width, header.height) != (first.width, first.height):
            raise DataError(
                f"image {str(header.path)!r} is {header.width} x {header.height}, but must be {first.width} x "
                f"{first.height} like {str(first.path)!r}; scale all images to one size"
            )
    mode, channels = ("L", 1) if all(header.gray for header in headers) else ("RGB", 3)
    try:
        inputs = np.empty((len(headers), channels, first.height, first.width), np.float32)
    except MemoryError as error:
        raise DataError(f"data folder {str(folder)!r} is too large for memory; use fewer or smaller images") from error
    for row, header in enumerate(headers):
        pixels = _read_pixels(header.path, mode)
        inputs[row] = np.moveaxis(pixels.reshape(first.height, first.width, channels), 2, 0)
    inputs /= np.float32(_MAX_BYTE)
    return Dataset(inputs=inputs, labels=np.array([header.label for header in headers], np.int64))


def _list_images(folder: Path) -> list[tuple[Path, int]]:
    try:
        classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        images = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted(name.iterdir())
            if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
        ]
    except OSError as error:
        raise FileError(f"data folder {str(folder)!r} cannot be read ({error}); check its permissions") from error
    if not images:
        raise DataError(
            f"data folder {str(folder)!r} has {len(classes)} class folders and no image; "
            "put the images of each class into a folder with the class's name"
        )
    return images


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
