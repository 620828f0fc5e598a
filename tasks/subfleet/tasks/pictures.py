"""Read one picture: its header, and its pixels in gray or colour, upright and with 8 bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError, MissingExtraError

MAX_IMAGE_PIXELS = 2**24
"""Most pixels of one image; checked from the header before anything is decoded."""
MAX_BYTE = 255
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The only formats that Pillow tries, whatever the file's name: some of its others start programs."""
_GRAY_MODES = frozenset({"1", "L", "LA", "La"})
_COLOUR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"})
_SIXTEEN_BITS = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
_ORIENTATION = 0x0112
"""EXIF tag of the camera's orientation."""
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
"""From this orientation on, rows of the file are columns of the upright picture."""
_REASON_CHARACTERS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The header of a picture file.

    Attributes:
        path: path of the file.
        width: width of the upright picture in pixels.
        height: height of the upright picture in pixels.
        gray: whether it has one channel.
        orientation: EXIF orientation; 1 is upright.
    """

    path: Path
    width: int
    height: int
    gray: bool
    orientation: int = 1


def load_pillow() -> Any:
    """Import Pillow's module `Image`.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", "edge") from error
    return Image


def read_header(path: Path) -> Picture:
    """Read a picture's header without decoding its pixels.

    Raises:
        DataError: the picture cannot be used. The message is the end of a sentence that begins with the picture's name.
        MissingExtraError: Pillow is not installed.
    """
    with _open(path) as image:
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise DataError(f"has {width * height} pixels, but may have at most {MAX_IMAGE_PIXELS}; scale it down")
        if not _is_known(image):
            raise DataError(f"has mode {image.mode}, but must have 8 or 16 bits per channel; convert it")
        orientation = _read_orientation(image)
        if orientation >= _FIRST_TURNED_OVER:
            width, height = height, width
        gray = image.mode not in _COLOUR_MODES
        return Picture(path=path, width=width, height=height, gray=gray, orientation=orientation)


def read_pixels(picture: Picture, channels: int) -> npt.NDArray[np.uint8]:
    """Decode a picture, upright: (channels, height, width). Transparency and the lower 8 of 16 bits are dropped.

    Args:
        picture: the header.
        channels: 1 for gray, 3 for red, green and blue.

    Raises:
        DataError: the picture cannot be decoded; for the message see `read_header`.
        MissingExtraError: Pillow is not installed.
    """
    with _open(picture.path) as image:
        try:
            pixels = _decode(image, picture, channels)
        # Decoders raise whatever the format's parser raises: OSError, SyntaxError, ValueError, IndexError ...
        except Exception as error:
            raise DataError(f"cannot be decoded ({_describe(error)}); replace or remove it") from error
    if pixels.shape != (picture.height, picture.width, channels):
        raise DataError("has a different size from its header; replace or remove it")
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
        image = image.convert("RGB")  # other colour modes can only be converted to gray through RGB
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), np.uint8)
    return pixels.reshape(*pixels.shape[:2], channels)


def _is_known(image: Any) -> bool:
    # Older releases of Pillow open 16-bit gray as 32 bits; the range of other 32-bit images is unknown.
    wide = image.mode == "I" and image.format in ("PNG", "PPM")
    return wide or image.mode in _GRAY_MODES | _COLOUR_MODES | _SIXTEEN_BITS


def _read_orientation(image: Any) -> int:
    # Pillow rotates TIFF itself, and would decode a whole PNG to look for a tag after the pixels.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - the picture is usable despite a damaged tag
        return 1
    return orientation if orientation in _TURNS else 1


def _open(path: Path) -> Any:
    pillow = load_pillow()
    try:
        return pillow.open(path, formats=_FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise DataError(f"is too large to decode ({_describe(error)}); scale it down") from error
    # The format's parser may raise almost anything on damaged files.
    except Exception as error:
        raise DataError(f"cannot be read ({_describe(error)}); replace or remove it") from error


def _describe(error: Exception) -> str:
    # Pillow repeats the file's name, which may be long.
    words = " ".join(str(error).split())
    return "it is not a picture of a known format" if "cannot identify" in words else f"{words:.{_REASON_CHARACTERS}}"
