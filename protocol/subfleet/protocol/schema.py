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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

from subfleet.protocol.bounds import MOST_PROBLEMS, choice_problem, find_problems, is_union
from subfleet.protocol.errors import (
    ConfigError,
    InvalidError,
    Problem,
    ProtocolError,
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

_PLAIN = frozenset((bool, float, int, str, type(None)))
_ALWAYS = object()
"""In place of a default: the field is written whatever its value."""

MAX_INTEGER = 2**63 - 1
"""Larger integers are refused: no count, size or time needs them, and other languages cannot represent them."""
MAX_TEXT_CHARACTERS = 4096
"""Longer strings are refused: names, paths and reasons are shorter."""


def to_plain(value: Any) -> Any:
    """Convert a dataclass to dicts, lists, strings and numbers. Union members have their name under their tag."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if dataclasses.is_dataclass(kind):
        plain = _build_tag(kind)
        for name, default in _list_written(kind):
            item = getattr(value, name)
            if default is _ALWAYS or item != default:
                plain[name] = to_plain(item)
        return plain
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


def _build_tag(kind: type) -> dict[str, Any]:
    tag = getattr(kind, "TYPE", None)
    return {} if tag is None else {get_tag(kind): tag}


@cache
def _list_written(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The names of a record's fields, each with the value at which it is omitted."""
    return tuple(
        (field.name, field.default if "added_later" in field.metadata else _ALWAYS)
        for field in dataclasses.fields(kind)
    )


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
    try:
        return read_plain(kind, plain)
    except InvalidError as error:
        sentence = error.problems[0].sentence(where or getattr(kind, "__name__", str(kind)))
        raise ProtocolError(sentence) from error


def validate(kind: type[T], plain: Any, what: str) -> T:
    """Build a record from parsed TOML or JSON that a person wrote; `what` names the source in errors, such as a file.

    Raises:
        ConfigError: lists every unknown or missing key, every value of a wrong type or out of bounds, and every broken
            rule.
    """
    try:
        return read_plain(kind, plain)
    except InvalidError as error:
        sentences = [problem.sentence() for problem in error.problems]
        if len(sentences) == 1:
            raise ConfigError(f"{what}: {sentences[0]}") from error
        head = f"{what} has {len(sentences)} problems:"
        raise ConfigError("\n  - ".join([head, *sentences])) from error


def read_plain(kind: type[T], plain: Any) -> T:
    """Build a value of `kind` from plain data.

    Raises:
        InvalidError: has all problems.
    """
    value: T = _make_reader(typing.cast("Hashable", kind))(plain)
    return value


_Read = Callable[[Any], Any]
"""Builds a value from plain data, or raises InvalidError."""


def _refuse(plain: Any, words: str) -> InvalidError:
    """Make the error of a value that is not what it must be; an earlier error in its place is passed on."""
    if isinstance(plain, InvalidError):
        return plain
    return InvalidError([Problem(text=f"is {plain!r:.80}, but must be {words}")])


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
        read = partial(_read_mapping, *map(_make_reader, members))
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        read = partial(_read_record, kind)
    else:
        read = _SCALARS.get(kind) or partial(_read_nothing, kind)
    return read


def _read_each(items: Iterable[tuple[str | int, _Read, Any]], problems: list[Problem]) -> dict[Any, Any]:
    """Read values under their keys until there are too many problems; those that are wrong are left out."""
    values = {}
    for key, read, item in items:
        try:
            values[key] = read(item)
        except InvalidError as error:
            problems += [problem.prefix(key) for problem in error.problems]
            if len(problems) >= MOST_PROBLEMS:
                break
    return values


def _read_all(items: Iterable[tuple[str | int, _Read, Any]]) -> dict[Any, Any]:
    """Read values under their keys; raises InvalidError if any is wrong."""
    problems: list[Problem] = []
    values = _read_each(items, problems)
    if problems:
        raise InvalidError(problems)
    return values


@cache
def _list_fields(kind: type) -> tuple[Mapping[str, _Read], frozenset[str], str]:
    """List the readers of a dataclass's fields and of its tag, the required fields, and the tag; "" without one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    tag = get_tag(kind) if hasattr(kind, "TYPE") else ""
    readers = {field.name: _make_reader(hints[field.name]) for field in fields}
    if tag:
        readers[tag] = partial(_read_choice, (getattr(kind, "TYPE", ""),))
    return readers, frozenset(required), tag


def _read_record(kind: type, plain: Any) -> Any:
    if not isinstance(plain, dict):
        raise _refuse(plain, "a table")
    readers, required, tag = _list_fields(kind)
    problems: list[Problem] = []
    items = ((key, readers.get(key) or partial(_refuse_key, kind, key), item) for key, item in plain.items())
    values = _read_each(items, problems)
    values.pop(tag, None)
    if not plain.keys() >= required:
        missing = (key for key in readers if key in required and key not in plain)
        problems += [Problem(text="is missing", keys=(key,)) for key in missing]
    if problems:
        raise InvalidError([*problems, *find_problems(kind, _list_defaults(kind, plain) | values)])
    try:
        return kind(**values)
    except InvalidError:
        raise
    except (ValueError, OverflowError, SubfleetError) as error:
        raise InvalidError.of(error) from error


def _refuse_key(kind: type, key: str, plain: Any) -> Any:
    known = (field.name for field in dataclasses.fields(kind))
    raise InvalidError([Problem(text=explain_unknown_key(key, known))])


def _list_defaults(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the values of omitted fields."""
    fields = [field for field in dataclasses.fields(kind) if field.name not in plain]
    made = {field.name: field.default_factory() for field in fields if field.default_factory is not dataclasses.MISSING}
    return made | {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _make_union_reader(members: tuple[Any, ...]) -> _Read:
    kinds = [member for member in members if member is not type(None)]
    read = (
        _make_reader(kinds[0])
        if len(kinds) == 1
        else partial(_read_closed, {getattr(kind, "TYPE", ""): kind for kind in kinds})
    )
    return (lambda plain: None if plain is None else read(plain)) if len(kinds) < len(members) else read


def _read_closed(kinds: Mapping[str, type], plain: Any) -> Any:
    return _read_record(kinds[_read_tag("type", tuple(kinds), plain)], plain)


def _read_open(registry: Registry[Any], plain: Any) -> Any:
    name = _read_tag(registry.tag, registry.names, plain)
    try:
        kind = registry.load(name)
    except ConfigError as error:
        raise InvalidError.of(error) from error
    return _read_record(kind, plain)


def _read_tag(tag: str, names: Sequence[str], plain: Any) -> str:
    """Read the name of a union member under its tag."""
    if not isinstance(plain, dict):
        raise _refuse(plain, "a table")
    name = plain.get(tag)
    if isinstance(name, str) and name in names:
        return name
    text = f"has the {tag} {name!r:.80}" if tag in plain else f"has no {tag}"
    suggestion = suggest(name, names) if isinstance(name, str) else ""
    raise InvalidError([Problem(text=f"{text}, but must be one of {list(names)}{suggestion}")])


def _read_items(read: _Read, plain: Any) -> Any:
    if not isinstance(plain, (list, tuple)):
        raise _refuse(plain, "a list")
    return tuple(_read_all((index, read, item) for index, item in enumerate(plain)).values())


def _read_tuple(members: tuple[Any, ...], plain: Any) -> Any:
    if not isinstance(plain, (list, tuple)) or len(plain) != len(members):
        raise _refuse(plain, f"a list of {len(members)}")
    return tuple(_read_all(zip(range(len(members)), map(_make_reader, members), plain, strict=True)).values())


def _read_mapping(read_key: _Read, read_item: _Read, plain: Any) -> Any:
    if not isinstance(plain, dict):
        raise _refuse(plain, "a table")
    keys: list[Problem] = []
    _read_each(((key, read_key, key) for key in plain), keys)
    problems = [Problem(text=f"has the key {problem.keys[0]!r:.80}, which {problem.text}") for problem in keys]
    values = _read_each(((key, read_item, item) for key, item in plain.items()), problems)
    if problems:
        raise InvalidError(problems)
    return values


def _read_choice(members: Sequence[Any], plain: Any) -> Any:
    if not isinstance(plain, (str, int)):
        raise _refuse(plain, f"one of {list(members)}")
    if text := choice_problem(members, plain):
        raise InvalidError([Problem(text=text)])
    return plain


def _read_float(plain: Any) -> Any:
    if isinstance(plain, float) and math.isfinite(plain):
        return plain
    if isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) <= MAX_INTEGER:
        return float(plain)
    raise _refuse(plain, "a finite number")


def _read_int(plain: Any) -> Any:
    if isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) <= MAX_INTEGER:
        return plain
    raise _refuse(plain, "a whole number")


def _read_bool(plain: Any) -> Any:
    if isinstance(plain, bool):
        return plain
    raise _refuse(plain, "true or false")


def _read_str(plain: Any) -> Any:
    if not isinstance(plain, str):
        raise _refuse(plain, "text")
    if len(plain) > MAX_TEXT_CHARACTERS:
        text = f"has {len(plain)} characters, but must have at most {MAX_TEXT_CHARACTERS}"
        raise InvalidError([Problem(text=text)])
    if _NO_TEXT.search(plain) is not None:
        raise _refuse(plain, "text without NUL and lone surrogates")
    return plain


def _read_nothing(kind: Any, plain: Any) -> Any:
    raise _refuse(plain, str(getattr(kind, "__name__", kind)))


_SCALARS: Mapping[Any, _Read] = MappingProxyType(
    {float: _read_float, int: _read_int, bool: _read_bool, str: _read_str, Any: lambda plain: plain}
)
