"""What one member may say: valid messages whose numbers, texts and lists are as odd as a decoder lets through."""

from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import MESSAGES, Message, decode, encode
from subfleet.protocol.plausible import plausible
from subfleet.protocol.schema import from_plain, to_plain

__all__ = ["NUMBERS", "distort", "rename_parts", "transmit", "with_number"]

NUMBERS = (-1, 0, 1, 2**40, 2**62, 2**63 - 1, 5e-324, 1e-9, 3.4e38, 1.7976931348623157e308, -1.7e308)
TEXTS = ("", "eve", "unknown", "x" * 64, "x" * 128, "x" * 600, "\u00e9" * 100, "section0", "{}", "[" * 200)
LENGTHS = (0, 1, 2, 16, 1000)
_FIXED = frozenset({"client_id"})
"""Who speaks is guarded by the broker."""

Place = tuple[str | int, ...]
_GONE = object()


def transmit(message: Message) -> Message:
    """What a server makes of a message.

    Raises:
        ProtocolError: it is not valid.
    """
    return plausible(decode(encode(message), expected=message.KIND))


@st.composite
def distort(draw: st.DrawFn, message: Message) -> Message | None:
    """A message with up to three odd values, or one odd number wherever that is valid; None where it is not valid."""
    plain: Any = to_plain(message)
    places = _free(plain)
    if draw(st.booleans()):
        return with_number(message, draw(st.sampled_from(NUMBERS)))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(places))
        if (before := _at(plain, place)) is not _GONE:
            _put(plain, place, draw(_odd(before)))
    return _valid(message, plain)


def with_number(message: Message, number: float) -> Message:
    """A message with a number in place of every other one that it may stand for."""
    for place in _free(to_plain(message)):
        plain: Any = to_plain(message)
        if isinstance(_at(plain, place), bool | str | list):
            continue
        _put(plain, place, number)
        message = _valid(message, plain) or message
    return message


def rename_parts(message: Message, text: str) -> Iterator[Message]:
    """A message with a text in place of another one, or with one more part of that name, wherever that is valid.

    What stands last comes first: that an update is another one than it was is accepted once, and ends its task.
    """
    for place in reversed(_free(to_plain(message))):
        plain: Any = to_plain(message)
        before = _at(plain, place)
        if isinstance(before, list):
            _put(plain, place, [*before, *([_called(before[-1], text)] if before else [text])])
        elif isinstance(before, str):
            _put(plain, place, text)
        else:
            continue
        if (found := _valid(message, plain)) is not None:
            yield found


def _called(part: Any, text: str) -> Any:
    """A copy of a part of a list by another name: the first text of it."""
    if isinstance(part, str):
        return text
    if isinstance(part, list) and part:
        return [_called(part[0], text), *part[1:]]
    return part


def _free(plain: Any) -> list[Place]:
    return [place for place in _places(plain) if place[0] not in _FIXED]


def _valid(message: Message, plain: Any) -> Message | None:
    try:
        return transmit(from_plain(MESSAGES[message.KIND], plain))
    except ProtocolError:
        return None


def _odd(before: Any) -> st.SearchStrategy[Any]:
    number, text = st.sampled_from(NUMBERS), st.sampled_from(TEXTS)
    if isinstance(before, bool):
        return st.booleans()
    if isinstance(before, list):
        return st.sampled_from(LENGTHS).map(lambda length: (before * length)[:length])
    if isinstance(before, str):
        return text
    return number if isinstance(before, int | float) else st.one_of(number, text)  # it was left out


def _places(plain: Any, so_far: Place = ()) -> Iterator[Place]:
    """Of everything that can be another value."""
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            yield from _places(value, (*so_far, name))
        return
    if so_far:
        yield so_far
    if isinstance(plain, list):
        for at, value in enumerate(plain[:8]):
            yield from _places(value, (*so_far, at))


def _at(plain: Any, place: Place) -> Any:
    try:
        for key in place:
            plain = plain[key]
    except (KeyError, IndexError, TypeError):  # what it was part of is another value by now
        return _GONE
    return plain


def _put(plain: Any, place: Place, value: Any) -> None:
    _at(plain, place[:-1])[place[-1]] = value
