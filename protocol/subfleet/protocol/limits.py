"""Bounds of the values in messages, as both sides store what the other one sends."""

from typing import Annotated

from subfleet.protocol.bounds import Length, Range, Texts

MAX_SAMPLES = 2**40
"""Samples of one client; the sum over a fleet must stay exact as a float."""
MAX_SINGLE = 2.0**128
"""Above every single-precision number. Programs compute in single precision, so their settings must be below it."""
MAX_LOSS = MAX_SINGLE
"""Programs compute losses in single precision. Squares of smaller losses, and sums over a fleet, stay finite."""
MAX_COUNTED_CLASSES = 4096
"""Classes that an evaluation counts one by one: three numbers for each always fit a control message."""

MAX_SECONDS = 1e9
MAX_NAME_CHARACTERS = 256
"""Length of each text in a list or a mapping."""
MAX_DIMENSIONS = 16
"""Dimensions of a sample."""
MAX_SHAPES = 8

SessionId = Annotated[str, Length(most=128)]
RunId = Annotated[str, Length(most=128)]
TaskId = Annotated[str, Length(most=384)]
MessageId = Annotated[str, Length(most=512)]
"""Id of a device's message; acks repeat it."""
NAMES = Texts(most=MAX_NAME_CHARACTERS)
SHOWN_NAMES = Texts(most=MAX_NAME_CHARACTERS, printable=True)
Shape = Annotated[tuple[int, ...], Length(most=MAX_DIMENSIONS)]
Shapes = Annotated[tuple[Shape, ...], Length(most=MAX_SHAPES)]
ClassCounts = Annotated[tuple[int, ...], Length(most=MAX_COUNTED_CLASSES)]
Count = Annotated[int, Range(least=0)]
Positive = Annotated[int, Range(least=1)]
Amount = Annotated[float, Range(least=0)]
PositiveAmount = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(least=0, most=1)]
PositiveFraction = Annotated[float, Range(above=0, most=1)]
Samples = Annotated[int, Range(least=1, most=MAX_SAMPLES)]
Loss = Annotated[float, Range(least=0, below=MAX_LOSS, words="a number of single precision, 0 or more")]
Seconds = Annotated[float, Range(least=0, most=MAX_SECONDS)]
