"""Converts frozen dataclasses to plain data and back, using only the standard library.

One reader checks plain data against annotations: received JSON (`from_plain`, which raises only `ProtocolError`) and
files that people write (`validate`, which lists every problem). It refuses wrong types and unknown or missing fields;
bounds and rules are checked by the records themselves, see `subfleet.protocol.bounds`.

Members of a union are told apart by a tag, the key `type` or the records' `TAG`. A union is closed, `This | That`, or
open, `Annotated[Seam, REGISTRY]`, with all installed members.
"""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

from subfleet.protocol.bounds import MOST_PROBLEMS, choice_problem, is_union, problems_with_values
from subfleet.protocol.errors import (
    ConfigError,
    InvalidError,
    Problem,
    ProtocolError,
    Refused,
    SubfleetError,
    TooLargeError,
)
from subfleet.protocol.registry import Registry
from subfleet.protocol.suggestion import explain_unknown_key, suggest

T = TypeVar("T")

ADDED_LATER: Mapping[str, bool] = MappingProxyType({"added_later": True})
"""Metadata of a field that is omitted if it has its default, so that earlier releases can read the rest and hashes stay
as they were."""

# JSON can contain lone surrogates, which UTF-8 cannot encode, and NUL, which databases refuse.
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")

MAX_INTEGER = 2**63 - 1
"""Larger integers are refused: no count, size or time needs them, and other languages cannot represent them."""
MAX_TEXT_CHARACTERS = 4096
"""Longer strings are refused: names, paths and reasons are shorter."""


def to_plain(value: Any) -> Any:
    """Convert a dataclass to dicts, lists, strings and numbers. Union members have their name under their tag."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {
            field.name: to_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if _is_written(field, value)
        }
        tag = getattr(type(value), "TYPE", None)
        return plain if tag is None else {get_tag(type(value)): tag, **plain}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def get_tag(kind: type) -> str:
    """Return the key under which plain data has the name of a union member."""
    tag: str = getattr(kind, "TAG", "type")
    return tag


def find_registry(kind: Any) -> Registry[Any] | None:
    """Find the registry of an open union; None for any other annotation."""
    if typing.get_origin(kind) is not typing.Annotated:
        return None
    return next((marker for marker in kind.__metadata__ if isinstance(marker, Registry)), None)


def _is_written(field: "dataclasses.Field[Any]", value: Any) -> bool:
    return "added_later" not in field.metadata or getattr(value, field.name) != field.default


def canonical_json(value: Any) -> bytes:
    """Encode as JSON with sorted keys and no spaces, so that equal values have equal bytes and hashes.

    Raises:
        ProtocolError: a number is not finite.
    """
    try:
        text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ProtocolError(f"a message holds a number that is not finite: {error}") from error
    return text.encode()


def parse_json(payload: bytes | memoryview, *, max_bytes: int) -> Any:
    """Parse received JSON.

    Raises:
        TooLargeError: the payload is longer than max_bytes.
        ProtocolError: the payload is not JSON.
    """
    if len(payload) > max_bytes:
        raise TooLargeError(f"a control message is {len(payload)} bytes, but must be at most {max_bytes}")
    try:
        return json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message is not JSON: {error}") from error


def from_plain(kind: type[T], plain: Any, where: str = "") -> T:
    """Build a value of `kind` from parsed JSON.

    Raises:
        ProtocolError: a field is missing, unknown, of the wrong type or out of bounds; the message names the first.
    """
    value, problems = _read(kind, plain)
    if problems:
        raise ProtocolError(problems[0].sentence(where or getattr(kind, "__name__", str(kind))))
    return value


def validate(kind: type[T], plain: Any, what: str) -> T:
    """Build a record from parsed TOML or JSON that a person wrote; `what` names the source in errors, such as a file.

    Raises:
        ConfigError: lists every unknown or missing key, every value of a wrong type or out of bounds, and every broken
            rule.
    """
    value, problems = _read(kind, plain)
    if len(problems) == 1:
        raise ConfigError(f"{what}: {problems[0].sentence()}")
    if problems:
        head = f"{what} has {len(problems)} problems:"
        raise ConfigError("\n  - ".join([head, *(problem.sentence() for problem in problems)]))
    return value


def problems_with(kind: type, plain: Any) -> tuple[Problem, ...]:
    """Find all problems that prevent building a record from plain data."""
    return tuple(_read(kind, plain)[1])


_Read = Callable[[Any, list[Problem]], Any]
"""Builds a value from plain data; if it cannot, it appends problems and returns `_NOTHING`."""
_NOTHING: Any = object()


def _read(kind: type[T], plain: Any) -> tuple[T, list[Problem]]:
    problems: list[Problem] = []
    return _make_reader(typing.cast("Hashable", kind))(plain, problems), problems


def _refuse(plain: Any, words: str, problems: list[Problem]) -> Any:
    if isinstance(plain, Refused):
        problems += plain.problems
    else:
        problems.append(Problem(text=f"is {plain!r:.80}, but must be {words}"))
    return _NOTHING


def _join_path(key: str | int, problems: list[Problem], start: int) -> None:
    """Prefix the problems from `start` on with a key."""
    problems[start:] = [problem.under(key) for problem in problems[start:]]


@cache  # a manifest has thousands of values of a few kinds
def _make_reader(kind: Any) -> _Read:
    """Make the reader of a kind."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if (registry := find_registry(kind)) is not None:
        read: _Read = partial(_read_open, registry)
    elif origin is typing.Annotated:
        read = _make_reader(members[0])
    elif is_union(kind):
        read = _make_union_reader(members)
    elif origin is typing.Literal:
        read = partial(_read_choice, members)
    elif origin is tuple:
        read = partial(_read_items, _make_reader(members[0])) if ... in members else partial(_read_tuple, members)
    elif origin in (dict, Mapping):
        key, item = map(_make_reader, members)
        read = partial(_read_mapping, key, item)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        read = partial(_read_record, kind)
    else:
        read = _SCALARS.get(kind) or partial(_read_nothing, kind)
    return read


@cache
def _list_fields(kind: type) -> tuple[Mapping[str, _Read], frozenset[str]]:
    """List the readers of a dataclass's fields, and the required fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return {field.name: _make_reader(hints[field.name]) for field in fields}, frozenset(required)


def _read_record(kind: type, plain: Any, problems: list[Problem]) -> Any:
    if not isinstance(plain, dict):
        return _refuse(plain, "a table", problems)
    before = len(problems)
    values = _read_fields(kind, plain, problems)
    if len(problems) > before:
        problems += problems_with_values(kind, _list_defaults(kind, plain) | values)
        return _NOTHING
    try:
        return kind(**values)
    except InvalidError as error:
        problems += error.problems
    except (ValueError, OverflowError, SubfleetError) as error:
        problems.append(Problem(text=str(error), is_sentence=True))
    return _NOTHING


def _list_defaults(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the values of omitted fields."""
    fields = [field for field in dataclasses.fields(kind) if field.name not in plain]
    made = {field.name: field.default_factory() for field in fields if field.default_factory is not dataclasses.MISSING}
    return made | {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _read_fields(kind: type, plain: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Read the values of the valid fields."""
    fields, required = _list_fields(kind)
    values = {}
    for name, item in plain.items():
        count = len(problems)
        if count >= MOST_PROBLEMS:
            break
        if name in fields:
            value = fields[name](item, problems)
            if value is _NOTHING:
                _join_path(name, problems, count)
            else:
                values[name] = value
        elif hasattr(kind, "TYPE") and name == get_tag(kind):
            _read_choice((kind.TYPE,), item, problems)
            _join_path(name, problems, count)
        else:
            problems.append(explain_unknown_key(str(name), fields))
    if not plain.keys() >= required:
        missing = (name for name in fields if name in required and name not in plain)
        problems += [Problem(text="is missing", keys=(name,)) for name in missing]
    return values


def _make_union_reader(members: tuple[Any, ...]) -> _Read:
    kinds = [member for member in members if member is not type(None)]
    read = (
        _make_reader(kinds[0])
        if len(kinds) == 1
        else partial(_read_closed, {getattr(kind, "TYPE", ""): kind for kind in kinds})
    )
    return partial(_read_optional, read) if len(kinds) < len(members) else read


def _read_optional(read: _Read, plain: Any, problems: list[Problem]) -> Any:
    return None if plain is None else read(plain, problems)


def _read_closed(kinds: Mapping[str, type], plain: Any, problems: list[Problem]) -> Any:
    name = _name_member("type", tuple(kinds), plain, problems)
    return _NOTHING if name is None else _read_record(kinds[name], plain, problems)


def _read_open(registry: Registry[Any], plain: Any, problems: list[Problem]) -> Any:
    if (name := _name_member(registry.tag, registry.names, plain, problems)) is None:
        return _NOTHING
    try:
        kind = registry.named(name)
    except ConfigError as error:
        problems.append(Problem(text=str(error), is_sentence=True))
        return _NOTHING
    return _read_record(kind, plain, problems)


def _name_member(tag: str, names: Sequence[str], plain: Any, problems: list[Problem]) -> str | None:
    """Read the name of a union member; None with a problem if it is missing or unknown."""
    if not isinstance(plain, dict):
        _refuse(plain, "a table", problems)
        return None
    name = plain.get(tag)
    if isinstance(name, str) and name in names:
        return name
    text = f"has the {tag} {name!r:.80}" if tag in plain else f"has no {tag}"
    suggestion = suggest(name, names) if isinstance(name, str) else ""
    problems.append(Problem(text=f"{text}, but must be one of {list(names)}{suggestion}"))
    return None


def _read_items(read: _Read, plain: Any, problems: list[Problem]) -> Any:
    if not isinstance(plain, (list, tuple)):
        return _refuse(plain, "a list", problems)
    before = count = len(problems)
    values = []
    for index, item in enumerate(plain):
        value = read(item, problems)
        if value is _NOTHING:
            _join_path(index, problems, count)
            count = len(problems)
            if count >= MOST_PROBLEMS:
                break
        values.append(value)
    return tuple(values) if count == before else _NOTHING


def _read_tuple(members: tuple[Any, ...], plain: Any, problems: list[Problem]) -> Any:
    if not isinstance(plain, (list, tuple)) or len(plain) != len(members):
        return _refuse(plain, f"a list of {len(members)}", problems)
    before, values = len(problems), []
    for index, (kind, item) in enumerate(zip(members, plain, strict=True)):
        count = len(problems)
        values.append(_make_reader(kind)(item, problems))
        _join_path(index, problems, count)
    return tuple(values) if len(problems) == before else _NOTHING


def _read_mapping(read_key: _Read, read_item: _Read, plain: Any, problems: list[Problem]) -> Any:
    if not isinstance(plain, dict):
        return _refuse(plain, "a table", problems)
    before, values = len(problems), {}
    for key, item in plain.items():
        wrong: list[Problem] = []
        name = read_key(key, wrong)
        problems += [Problem(text=f"has the key {key!r:.80}, which {problem.text}") for problem in wrong]
        count = len(problems)
        values[name] = read_item(item, problems)
        _join_path(str(key), problems, count)
        if len(problems) >= MOST_PROBLEMS:
            break
    return values if len(problems) == before else _NOTHING


def _read_choice(members: Sequence[Any], plain: Any, problems: list[Problem]) -> Any:
    if isinstance(plain, (str, int)) and (text := choice_problem(members, plain)):
        problems.append(Problem(text=text))
        return _NOTHING
    return plain if isinstance(plain, (str, int)) else _refuse(plain, f"one of {list(members)}", problems)


def _read_float(plain: Any, problems: list[Problem]) -> Any:
    if isinstance(plain, float) and math.isfinite(plain):
        return plain
    if isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) <= MAX_INTEGER:
        return float(plain)
    return _refuse(plain, "a finite number", problems)


def _read_int(plain: Any, problems: list[Problem]) -> Any:
    if isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) <= MAX_INTEGER:
        return plain
    return _refuse(plain, "a whole number", problems)


def _read_bool(plain: Any, problems: list[Problem]) -> Any:
    return plain if isinstance(plain, bool) else _refuse(plain, "true or false", problems)


def _read_str(plain: Any, problems: list[Problem]) -> Any:
    if not isinstance(plain, str):
        return _refuse(plain, "text", problems)
    if len(plain) > MAX_TEXT_CHARACTERS:
        text = f"has {len(plain)} characters, but must have at most {MAX_TEXT_CHARACTERS}"
        problems.append(Problem(text=text))
        return _NOTHING
    if _NO_TEXT.search(plain) is not None:
        return _refuse(plain, "text without NUL and lone surrogates", problems)
    return plain


def _read_nothing(kind: Any, plain: Any, problems: list[Problem]) -> Any:
    return _refuse(plain, str(getattr(kind, "__name__", kind)), problems)


_SCALARS: Mapping[Any, _Read] = MappingProxyType(
    {float: _read_float, int: _read_int, bool: _read_bool, str: _read_str, Any: lambda plain, problems: plain}
)
