"""How long texts and lists in messages may be, as both sides keep what the other one sends."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "ANSWER_LIMITS",
    "EVALUATION_LIMITS",
    "MAX_COUNTED_CLASSES",
    "MAX_LOSS",
    "MAX_SAMPLES",
    "MAX_SINGLE",
    "PRESENCE_LIMITS",
    "PROFILE_LIMITS",
    "RECEIPT_LIMITS",
    "ROUND_LIMITS",
    "TASK_LIMITS",
    "TELEMETRY_LIMITS",
    "check_lengths",
    "check_names",
    "check_seconds",
    "check_shapes",
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

PRESENCE_LIMITS: Mapping[str, int] = MappingProxyType({"session_id": 128, "message_id": 512, "reason": 128})
PROFILE_LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "session_id": 128,
        "message_id": 512,
        "device": 128,
        "runtimes": 16,
        "class_counts": 65_536,
        "input_shape": MAX_DIMENSIONS,
        "software": 64,
        "operators": 1024,
        "network": 4096,
    }
)
TELEMETRY_LIMITS: Mapping[str, int] = MappingProxyType({"session_id": 128, "message_id": 512, "run_id": 128})
ANSWER_LIMITS: Mapping[str, int] = MappingProxyType({"message_id": 512, "task_id": 384, "run_id": 128})
"""A receipt names the message that it is of."""
ROUND_LIMITS: Mapping[str, int] = MappingProxyType({"run_id": 128, "message_id": 256})
TASK_LIMITS: Mapping[str, int] = MappingProxyType({"run_id": 128, "task_id": 384, "message_id": 384})
RECEIPT_LIMITS: Mapping[str, int] = MappingProxyType({"of": 512, "reason": 4096, "message_id": 640})
"""Of what a server sends: devices make ids of its ids, and files by them."""
EVALUATION_LIMITS: Mapping[str, int] = MappingProxyType(
    {"class_counts": MAX_COUNTED_CLASSES, "class_correct": MAX_COUNTED_CLASSES}
)
"""By field, the most characters of a text, or items of a list or a mapping."""


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


def check_shapes(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Refuse a field with too many shapes, or one of too many sizes.

    Raises:
        ValueError: it is; the text names the field.
    """
    if len(shapes) > MAX_SHAPES or max(map(len, shapes), default=0) > MAX_DIMENSIONS:
        raise ValueError(f"{name} may have {MAX_SHAPES} shapes of {MAX_DIMENSIONS} sizes at most, but has more")


def _check_names(field: str, value: Iterable[Any]) -> None:
    texts = (*value, *value.values()) if isinstance(value, Mapping) else value
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > MAX_NAME_CHARACTERS:
        raise ValueError(f"{field} has a text of {longest} characters, but may have {MAX_NAME_CHARACTERS} at most")
