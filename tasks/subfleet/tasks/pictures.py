"""One picture in a file: what its header says, and its pixels in gray or in colour, upright and in 8 bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError, MissingExtraError

MAX_IMAGE_PIXELS = 2**24
"""Pixels of one image, checked from its header before anything is decoded."""
MAX_BYTE = 255
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow tries these alone, whatever a file is called: it has others that start programs."""
_GRAY_MODES = frozenset({"1", "L", "LA", "La"})
_COLOUR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"})
_SIXTEEN_BITS = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
_ORIENTATION = 0x0112
"""EXIF's tag of how a camera was held."""
_TURNS: Mapping[int, str] = MappingProxyType(
    {
        2: "FLIP_LEFT_RIGHT",
        3: "ROTATE_180",
        4: "FLIP_TOP_BOTTOM",
        5: "TRANSPOSE",
        6: "ROTATE_270",
        7: "TRANSVERSE",
        8: "ROTATE_90",
    }
)
_FIRST_TURNED_OVER = 5
"""From this orientation on, rows of the file are columns of the picture."""
_REASON_CHARACTERS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What the header of a picture's file says.

    Attributes:
        path: of the file.
        width: in pixels, of the upright picture.
        height: likewise.
        gray: whether it has one channel.
        orientation: EXIF's number of how it has to be turned; 1 leaves it as it is.
    """

    path: Path
    width: int
    height: int
    gray: bool
    orientation: int = 1


def load_pillow() -> Any:
    """Pillow's module `Image`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", "edge") from error
    return Image


def read_header(path: Path) -> Picture:
    """Read what a picture is; nothing is decoded.

    Raises:
        DataError: it cannot be used. The text is the end of a sentence about it, without its name.
        MissingExtraError: Pillow is not installed.
    """
    with _open(path) as image:
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise DataError(f"has {width * height} pixels, but may have {MAX_IMAGE_PIXELS}; scale it down")
        if not _is_known(image):
            raise DataError(f"is of mode {image.mode}, but must have 8 or 16 bits a channel; convert it")
        orientation = _read_orientation(image)
        if orientation >= _FIRST_TURNED_OVER:
            width, height = height, width
        gray = image.mode not in _COLOUR_MODES
        return Picture(path=path, width=width, height=height, gray=gray, orientation=orientation)


def read_pixels(picture: Picture, channels: int) -> npt.NDArray[np.uint8]:
    """Decode a picture, upright: (channels, height, width). Transparency is dropped, as are the lower 8 bits of 16.

    Args:
        picture: as `read_header` has read it.
        channels: 1 for gray, 3 for red, green and blue.

    Raises:
        DataError: it cannot be decoded; as of `read_header`.
        MissingExtraError: Pillow is not installed.
    """
    with _open(picture.path) as image:
        pixels = _tried("cannot be decoded", lambda: _decode(image, picture, channels))
    if pixels.shape != (picture.height, picture.width, channels):
        raise DataError("is of another size than its header says; replace or remove it")
    result: npt.NDArray[np.uint8] = np.moveaxis(pixels, 2, 0)
    return result


def _decode(image: Any, picture: Picture, channels: int) -> npt.NDArray[np.uint8]:
    image.load()
    turn = _TURNS.get(picture.orientation)
    if turn is not None:
        image = image.transpose(getattr(load_pillow().Transpose, turn))
    if image.mode in _SIXTEEN_BITS or image.mode == "I":
        image = load_pillow().fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    elif image.mode in _COLOUR_MODES:
        image = image.convert("RGB")  # from the other colour modes there is no way to gray but this
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), np.uint8)
    return pixels.reshape(*pixels.shape[:2], channels)


def _is_known(image: Any) -> bool:
    # Older releases of Pillow open 16 bits of gray as 32; elsewhere nobody can tell what 32 bits are in parts of.
    wide = image.mode == "I" and image.format in ("PNG", "PPM")
    return wide or image.mode in _GRAY_MODES | _COLOUR_MODES | _SIXTEEN_BITS


def _read_orientation(image: Any) -> int:
    # Pillow turns TIFF by itself, and would decode the whole of a PNG to look for a tag behind its pixels.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - a damaged tag takes nothing from the picture
        return 1
    return found if found in _TURNS else 1


def _open(path: Path) -> Any:
    pillow = load_pillow()
    try:
        return pillow.open(path, formats=_FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise DataError(f"is too large to decode ({_describe(error)}); scale it down") from error
    # The header is read by the format's own parser, which may raise nearly anything on broken files.
    except Exception as error:
        raise DataError(f"cannot be read ({_describe(error)}); replace or remove it") from error


def _tried(what: str, decode: Callable[[], npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    try:
        return decode()
    # Decoders raise whatever their format's parser stumbles over: OSError, SyntaxError, ValueError, IndexError ...
    except Exception as error:
        raise DataError(f"{what} ({_describe(error)}); replace or remove it") from error


def _describe(error: Exception) -> str:
    # Pillow names the file again, which may be long.
    words = " ".join(str(error).split())
    return "it is no picture of a known format" if "cannot identify" in words else f"{words:.{_REASON_CHARACTERS}}"
