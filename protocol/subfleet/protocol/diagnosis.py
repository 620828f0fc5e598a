"""What is wrong with a file that a person wrote, in the same words for every kind of file."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.schema import from_plain
from subfleet.protocol.suggestion import did_you_mean

__all__ = ["MISSING_KEY", "from_fields", "refusal_of", "unknown_key"]

T = TypeVar("T")

MISSING_KEY = "is missing, but must be there"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What is said of a key that nothing is known by, with the name that may be meant."""
    known = sorted(known)
    return f"is an unknown key{did_you_mean(key, known) or f'; known are {known}'}"


def refusal_of(what: str, problems: Sequence[str]) -> ConfigError:
    """One sentence for one problem, a list for several; `what` names the file."""
    if len(problems) == 1:
        return ConfigError(f"{what}: {problems[0]}")
    return ConfigError("\n  - ".join([f"{what} has {len(problems)} problems:", *problems]))


def from_fields(kind: type[T], plain: Mapping[str, Any], what: str) -> T:
    """Build a record field by field, with nothing but the standard library; `what` names the file in errors.

    Raises:
        ConfigError: names every unknown and missing key and every field of a wrong type; or the first value that is out
            of its range.
    """
    record: Any = kind
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {field.name: field for field in dataclasses.fields(record)}
    problems = [f"{key} {unknown_key(key, known)}" for key in plain if key not in known]
    values = {}
    for name, field in known.items():
        if name in plain:
            try:
                values[name] = from_plain(hints[name], plain[name], name)
            except ProtocolError as error:
                problems.append(str(error))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{name} {MISSING_KEY}")
    if not problems:
        try:
            return typing.cast("T", record(**values))
        except (ValueError, ConfigError) as error:
            problems = [str(error)]
    raise refusal_of(what, problems)
