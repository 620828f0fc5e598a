"""Class names: their bounds, their natural order, and their indices in a run's list.

A run lists its class names in a fixed order, or none; then classes are numbered from 0, and the number is the name.
Data with named classes are mapped by name, never by the order of the classes on a device.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.schema import canonical_json, from_plain, parse_json

CLASS_NAMES = "class_names"
"""Name of the metadata entry, or of the method, by which a model file carries the class names."""
MAX_NAME_CHARACTERS = 64
MAX_NAMES_BYTES = 2**16
"""Size of all names of a run as JSON; they must fit control messages."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_SHOWN = 10


class _Names:
    """The bound of `ClassNames`."""

    def problem(self, names: Sequence[str]) -> str:
        """See `Bound`."""
        for name in names:
            if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
                return (
                    f"has {name!r:.80}, but a name must be 1 to {MAX_NAME_CHARACTERS} printable characters without "
                    "leading or trailing spaces"
                )
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            return f"has {repeated[0]!r} twice, but class names must be unique"
        size_bytes = len(canonical_json(names))
        if size_bytes > MAX_NAMES_BYTES:
            return f"takes {size_bytes} bytes, but may take at most {MAX_NAMES_BYTES}; shorten the names"
        return ""


_NAMES = _Names()
ClassNames = Annotated[tuple[str, ...], _NAMES]
"""Class names that can be shown, distinguished and sent."""


def check_class_names(names: Sequence[str]) -> None:
    """Check that names can be shown, distinguished and sent.

    Raises:
        ValueError: a name is empty, too long, not printable or repeated, or all names together are too long.
    """
    if text := _NAMES.problem(names):
        raise ValueError(f"the list of class names {text}")


def sort_naturally(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names by number if all are whole numbers, else by character.

    Raises:
        ValueError: two names are the same number, such as "2" and "02".
    """
    ordered = sorted(names)
    if not all(_NUMBER.fullmatch(name) for name in ordered):
        return tuple(ordered)
    by_number: dict[int, str] = {}
    for name in ordered:
        other = by_number.setdefault(int(name), name)
        if other != name:
            raise ValueError(f"the classes {other!r} and {name!r} are the same number; keep one of the names")
    return tuple(by_number[number] for number in sorted(by_number))


def find_class_indices(names: Sequence[str], classes: Sequence[str], class_count: int) -> tuple[int, ...]:
    """Find the index of each name among a run's classes.

    Args:
        names: class names of some data.
        classes: class names of the run, in its order; empty if it numbers its classes.
        class_count: number of the run's classes; 0 if unknown.

    Raises:
        ValueError: the run has no class of that name.
    """
    known = {name: index for index, name in enumerate(classes)}
    indices = [known.get(name, -1) if classes else _parse_number(name, class_count) for name in names]
    unknown = [name for name, index in zip(names, indices, strict=True) if index < 0]
    if unknown:
        numbers = f"the numbers 0 to {class_count - 1}" if class_count else "numbers"
        raise ValueError(
            f"the run has no class {_join(unknown)}: its classes are {_join(classes) if classes else numbers}"
        )
    return tuple(indices)


def format_class_names(names: Sequence[str]) -> str:
    """Format class names for a model file."""
    return canonical_json(list(names)).decode()


def parse_class_names(text: str) -> tuple[str, ...]:
    """Read what `format_class_names` wrote.

    Raises:
        ProtocolError: the text is not a list of valid names.
    """
    plain = parse_json(text.encode(errors="replace"), max_bytes=MAX_NAMES_BYTES)
    names = from_plain(tuple[str, ...], plain, "class names")
    try:
        check_class_names(names)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    return names


def _parse_number(name: str, class_count: int) -> int:
    """Parse a class number; -1 if it is not a number in canonical form below the class count."""
    if not _NUMBER.fullmatch(name) or str(int(name)) != name:
        return -1
    return int(name) if not class_count or int(name) < class_count else -1


def _join(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more
