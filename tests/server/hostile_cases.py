"""Messages of a hostile member: valid, with numbers, texts and lists as odd as the decoder accepts."""

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
"""The broker guards the identity of the sender."""

Position = tuple[str | int, ...]
_ABSENT = object()


def transmit(message: Message) -> Message:
    """Encode and decode a message, as the server receives it.

    Raises:
        ProtocolError: The message is not valid.
    """
    return plausible(decode(encode(message), expected=message.KIND))


@st.composite
def distort(draw: st.DrawFn, message: Message) -> Message | None:
    """A message with up to three odd values, or one odd number wherever valid; None if the result is not valid."""
    plain: Any = to_plain(message)
    positions = _list_free_positions(plain)
    if draw(st.booleans()):
        return with_number(message, draw(st.sampled_from(NUMBERS)))
    for _ in range(draw(st.integers(0, 3))):
        position = draw(st.sampled_from(positions))
        if (before := _get(plain, position)) is not _ABSENT:
            _set(plain, position, draw(_odd_values(before)))
    return _validate(message, plain)


def with_number(message: Message, number: float) -> Message:
    """Return a message with `number` in place of every number where it is valid."""
    for position in _list_free_positions(to_plain(message)):
        plain: Any = to_plain(message)
        if isinstance(_get(plain, position), bool | str | list):
            continue
        _set(plain, position, number)
        message = _validate(message, plain) or message
    return message


def rename_parts(message: Message, text: str) -> Iterator[Message]:
    """Yield each valid copy of a message with one text replaced by `text`, or with one more list item of that name.

    Later fields come first: a changed update is accepted once, and then ends its task.
    """
    for position in reversed(_list_free_positions(to_plain(message))):
        plain: Any = to_plain(message)
        before = _get(plain, position)
        if isinstance(before, list):
            _set(plain, position, [*before, *([_rename_item(before[-1], text)] if before else [text])])
        elif isinstance(before, str):
            _set(plain, position, text)
        else:
            continue
        if (copy := _validate(message, plain)) is not None:
            yield copy


def _rename_item(part: Any, text: str) -> Any:
    """Return a copy of a list item with another name: its first text."""
    if isinstance(part, str):
        return text
    if isinstance(part, list) and part:
        return [_rename_item(part[0], text), *part[1:]]
    return part


def _list_free_positions(plain: Any) -> list[Position]:
    return [position for position in _positions(plain) if position[0] not in _FIXED]


def _validate(message: Message, plain: Any) -> Message | None:
    try:
        return transmit(from_plain(MESSAGES[message.KIND], plain))
    except ProtocolError:
        return None


def _odd_values(before: Any) -> st.SearchStrategy[Any]:
    number, text = st.sampled_from(NUMBERS), st.sampled_from(TEXTS)
    if isinstance(before, bool):
        return st.booleans()
    if isinstance(before, list):
        return st.sampled_from(LENGTHS).map(lambda length: (before * length)[:length])
    if isinstance(before, str):
        return text
    return number if isinstance(before, int | float) else st.one_of(number, text)  # it was absent


def _positions(plain: Any, so_far: Position = ()) -> Iterator[Position]:
    """Yield the position of every value that can be replaced."""
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            yield from _positions(value, (*so_far, name))
        return
    if so_far:
        yield so_far
    if isinstance(plain, list):
        for index, value in enumerate(plain[:8]):
            yield from _positions(value, (*so_far, index))


def _get(plain: Any, position: Position) -> Any:
    try:
        for key in position:
            plain = plain[key]
    except (KeyError, IndexError, TypeError):  # its container has been replaced
        return _ABSENT
    return plain


def _set(plain: Any, position: Position, value: Any) -> None:
    _get(plain, position[:-1])[position[-1]] = value
