"""The transform of samples to a model's input, the same on devices, on the server and in predictions.

Tasks and exported models contain it, so that pictures are always prepared in the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from subfleet.protocol.bounds import Condition, Length, Range, checked
from subfleet.protocol.schema import canonical_json, from_plain, parse_json

DATA_TRANSFORM = "data_transform"
"""Name of the metadata entry, or of the method, by which a model file carries the transform."""
MAX_TEXT_BYTES = 4096
MAX_SIDE = 4096
MAX_SCALED_PIXELS = 2**24
"""Pixels of a picture after scaling: a long and narrow one could grow beyond any memory."""
MAX_CHANNELS = 64
MAX_VALUE = 1e6
"""Limit on means and deviations, and on 1 / deviation."""

Side = Annotated[int, Range(least=1, most=MAX_SIDE)]
Sides = Annotated[tuple[Side, ...], Length(most=2)]
"""[height, width], or [side], or none."""
Mean = Annotated[float, Range(least=-MAX_VALUE, most=MAX_VALUE)]
Deviation = Annotated[float, Range(least=1 / MAX_VALUE, most=MAX_VALUE)]


def _check_crop(crop: tuple[int, ...], resize: tuple[int, ...]) -> Iterator[str]:
    if resize and any(cut > side for cut, side in zip(_pair(crop), _pair(resize), strict=False)):
        yield f"crop is {list(crop)}, but pictures are scaled to {list(resize)}; choose a crop within that size"


def _check_normalisation(mean: tuple[float, ...], deviation: tuple[float, ...], channels: int) -> Iterator[str]:
    if len(mean) != len(deviation):
        yield (
            f"mean has {len(mean)} numbers and deviation {len(deviation)}, but both must have one for all, or one for "
            "each channel"
        )
    elif channels and len(mean) not in (0, 1, channels):
        yield f"mean has {len(mean)} numbers, but there are {channels} channels"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_crop, _check_normalisation)
class DataTransform:
    """The transform of each picture before it is fed, in this order; every part is optional.

    Attributes:
        channels: 1 makes pictures gray, 3 coloured; 0 leaves arrays as they are, and gives pictures in folders the
            channels that the model takes.
        resize: (height, width) scales each picture to that; (side,) scales its shorter side to it, and the longer one
            in proportion.
        crop: (height, width), or (side,) for a square, cut out of the middle.
        mean: taken off each channel, or off all where it is one number; on the scale on which samples are fed, 0 to 1
            for pictures of 8 bits.
        deviation: that the difference is divided by, as many numbers, above 0.

    Raises:
        ValueError: a number is out of its range, or numbers do not fit each other.
    """

    channels: Annotated[
        int, Condition(accepts=(0, 1, 3).__contains__, words="1 for gray, 3 for colour, or 0 for either")
    ] = 0
    resize: Sides = ()
    crop: Sides = ()
    mean: Annotated[tuple[Mean, ...], Length(most=MAX_CHANNELS)] = ()
    deviation: tuple[Deviation, ...] = ()

    @property
    def fixes_size(self) -> bool:
        """Whether pictures of any size get one size."""
        return bool(self.crop) or len(self.resize) == 2

    def compute_scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """Compute height and width of a picture after scaling and before cropping."""
        if len(self.resize) != 1:
            return (self.resize[0], self.resize[1]) if self.resize else (height, width)
        side, shorter = self.resize[0], min(height, width)
        # To the nearest whole number, halves up: whole numbers alone are the same on every machine.
        return (2 * height * side + shorter) // (2 * shorter), (2 * width * side + shorter) // (2 * shorter)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what a picture becomes.

        Raises:
            ValueError: it is smaller than its crop, or would be too large after scaling.
        """
        scaled = self.compute_scaled_size(height, width)
        if scaled[0] * scaled[1] > MAX_SCALED_PIXELS and scaled != (height, width):
            raise ValueError(
                f"{width} x {height} would be scaled to {scaled[1]} x {scaled[0]}, but may have at most "
                f"{MAX_SCALED_PIXELS} pixels"
            )
        cut = self.cut_size(scaled)
        if cut[0] > scaled[0] or cut[1] > scaled[1]:
            raise ValueError(f"{cut[1]} x {cut[0]} cannot be cut out of {scaled[1]} x {scaled[0]}; resize it first")
        return cut

    def cut_size(self, scaled: tuple[int, int]) -> tuple[int, int]:
        """Height and width of what is cut out of a picture that is scaled already."""
        cut = _pair(self.crop)
        return (cut[0], cut[1]) if cut else scaled

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of what a sample becomes: (channels, height, width), or without the first where the sample is.

        Raises:
            ValueError: it is not a picture, has another number of channels than means, or is too small.
        """
        if len(shape) not in (2, 3) or not all(size >= 1 for size in shape):
            raise ValueError(f"samples of shape {tuple(shape)} are not pictures of shape (channels, height, width)")
        height, width = self.size_of(shape[-2], shape[-1])
        channels = self.channels or (shape[0] if len(shape) == 3 else 1)
        if self.channels and len(shape) == 3 and shape[0] not in (1, 3):
            raise ValueError(f"pictures of {shape[0]} channels cannot be converted to {self.channels}")
        if len(self.mean) > 1 and len(self.mean) != channels:
            raise ValueError(f"mean has {len(self.mean)} numbers, but pictures have {channels} channels")
        return (height, width) if len(shape) == 2 and channels == 1 else (channels, height, width)


def format_transform(transform: DataTransform) -> str:
    """Format a transform for a model file or a data file."""
    return canonical_json(transform).decode()


def parse_transform(text: str) -> DataTransform:
    """Read what `format_transform` wrote.

    Raises:
        ProtocolError: the text is not a valid transform.
    """
    return from_plain(DataTransform, parse_json(text.encode(errors="replace"), max_bytes=MAX_TEXT_BYTES))


def _pair(sides: tuple[int, ...]) -> tuple[int, ...]:
    return sides * 2 if len(sides) == 1 else sides
