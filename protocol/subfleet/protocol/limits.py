"""Bounds of what messages hold, as both sides keep what the other one sends."""

from typing import Annotated

from subfleet.protocol.bounds import Length, Range, Texts

MAX_SAMPLES = 2**40
"""Of one client; the sum of a fleet's samples must stay a number that weights can be."""
MAX_SINGLE = 2.0**128
"""Above all numbers of single precision, in which programs compute: a setting of theirs must be below it."""
MAX_LOSS = MAX_SINGLE
"""Programs compute losses, and squares of them, in single precision, in which all numbers are smaller: the square of
each, and the sum of a fleet's, is a number."""
MAX_COUNTED_CLASSES = 4096
"""Of an evaluation that counts each class: three numbers for each, which always fit a control message."""

MAX_SECONDS = 1e9
MAX_NAME_CHARACTERS = 256
"""Of each text in a list or a mapping."""
MAX_DIMENSIONS = 16
"""Of the shape of a sample."""
MAX_SHAPES = 8

SessionId = Annotated[str, Length(most=128)]
RunId = Annotated[str, Length(most=128)]
TaskId = Annotated[str, Length(most=384)]
MessageId = Annotated[str, Length(most=512)]
"""Of what a device sends, whose acks name it."""
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
