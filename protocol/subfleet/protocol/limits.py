"""Bounds of what messages hold, as both sides keep what the other one sends."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from subfleet.protocol.bounds import Length, Range, Texts

__all__ = [
    "MAX_COUNTED_CLASSES",
    "MAX_LOSS",
    "MAX_NAME_CHARACTERS",
    "MAX_SAMPLES",
    "MAX_SINGLE",
    "NAMES",
    "SHOWN_NAMES",
    "TASK_LIMITS",
    "Amount",
    "ClassCounts",
    "Count",
    "Loss",
    "MessageId",
    "Positive",
    "RunId",
    "Samples",
    "Seconds",
    "SessionId",
    "Shape",
    "Shapes",
    "Share",
    "TaskId",
    "check_lengths",
    "check_names",
    "check_seconds",
]

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
"""Of what a device sends, whose receipts name it."""
NAMES = Texts(most=MAX_NAME_CHARACTERS)
SHOWN_NAMES = Texts(most=MAX_NAME_CHARACTERS, printable=True)
Shape = Annotated[tuple[int, ...], Length(most=MAX_DIMENSIONS)]
Shapes = Annotated[tuple[Shape, ...], Length(most=MAX_SHAPES)]
ClassCounts = Annotated[tuple[int, ...], Length(most=MAX_COUNTED_CLASSES)]
Count = Annotated[int, Range(least=0)]
Positive = Annotated[int, Range(least=1)]
Amount = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
Samples = Annotated[int, Range(least=1, most=MAX_SAMPLES)]
Loss = Annotated[float, Range(least=0, below=MAX_LOSS, words="a number of single precision, 0 or more")]
Seconds = Annotated[float, Range(least=0, most=MAX_SECONDS)]
TASK_LIMITS: Mapping[str, int] = MappingProxyType({"run_id": 128, "task_id": 384, "message_id": 384})


def check_lengths(message: Any, limits: Mapping[str, int]) -> None:
    """Refuse a message with a field that is too long.

    Raises:
        ValueError: a field is; the text names it.
    """
    for name, most in limits.items():
        value = getattr(message, name)
        if value is None:
            continue
        if len(value) > most:
            kind = "characters" if isinstance(value, str) else "items"
            raise ValueError(f"{name} has {len(value)} {kind}, but may have {most} at most")
        if not isinstance(value, str):
            _check_names(name, value)


def check_names(message: Any, *names: str) -> None:
    """Refuse a message with a name that is empty, or has characters on which terminals act.

    Raises:
        ValueError: one is or has; the text says which.
    """
    for name in names:
        value: str = getattr(message, name)
        if not value or not value.isprintable():
            raise ValueError(f"{name} is {value!r:.80}, but must be 1 or more printable characters")


def check_seconds(name: str, seconds: float) -> None:
    """Refuse a span of time that is none.

    Raises:
        ValueError: it is below 0, or above 30 years.
    """
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{name} is {seconds}, but must be 0 to {MAX_SECONDS:g}")


def _check_names(field: str, value: Iterable[Any]) -> None:
    texts = (*value, *value.values()) if isinstance(value, Mapping) else value
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > MAX_NAME_CHARACTERS:
        raise ValueError(f"{field} has a text of {longest} characters, but may have {MAX_NAME_CHARACTERS} at most")
