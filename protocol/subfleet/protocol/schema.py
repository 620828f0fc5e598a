"""Frozen dataclasses to JSON and back, with nothing but the standard library.

`from_plain` is the only door through which received JSON enters: it checks every type against the annotations, refuses
unknown and missing fields, and raises `ProtocolError` and nothing else, whatever it is given.

A union of records is told apart by a tag, the key `type` unless the records' `TAG` says another. It is closed,
`This | That`, or open, `Annotated[Seam, REGISTRY]`: then it has whatever is installed.
"""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from subfleet.protocol.errors import ConfigError, ProtocolError, TooLargeError
from subfleet.protocol.registry import Registry

__all__ = [
    "ADDED_LATER",
    "MAX_INTEGER",
    "MAX_TEXT_CHARACTERS",
    "canonical_json",
    "from_plain",
    "is_union",
    "parse_json",
    "registry_of",
    "tag_of",
    "to_plain",
]

T = TypeVar("T")

ADDED_LATER: Mapping[str, bool] = MappingProxyType({"added_later": True})
"""Metadata of a field with a default that readers of an earlier release do not know: it is left out where it has its
default, so that they understand the rest, and what is hashed stays as it was."""

# JSON can spell half a surrogate pair and NUL, but UTF-8 has no bytes for the one, and databases refuse the other.
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")

MAX_INTEGER = 2**63 - 1
"""Larger integers are refused: no count, size or time of ours needs them, and other languages cannot hold them."""
MAX_TEXT_CHARACTERS = 4096
"""Longer strings are refused: names, paths and reasons are shorter, and a receipt repeats the id that it answers."""


def to_plain(value: Any) -> Any:
    """Turn a dataclass into dicts, lists, strings and numbers. Members of a union carry their name under their tag."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {
            field.name: to_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if _told(field, value)
        }
        tag = getattr(type(value), "TYPE", None)
        return plain if tag is None else {tag_of(type(value)): tag, **plain}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def tag_of(kind: type) -> str:
    """The key under which plain data has the name of a union's member."""
    tag: str = getattr(kind, "TAG", "type")
    return tag


def registry_of(kind: Any) -> Registry[Any] | None:
    """The registry of an open union; None for any other annotation."""
    if typing.get_origin(kind) is not typing.Annotated:
        return None
    return next((marker for marker in kind.__metadata__ if isinstance(marker, Registry)), None)


def is_union(kind: Any) -> bool:
    """Whether an annotation is a closed union."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _told(field: "dataclasses.Field[Any]", value: Any) -> bool:
    return "added_later" not in field.metadata or getattr(value, field.name) != field.default


def canonical_json(value: Any) -> bytes:
    """Encode as JSON with sorted keys and no spaces: equal values have equal bytes, so they can be hashed.

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
        raise TooLargeError(f"a control message is {len(payload)} bytes, but may be {max_bytes} bytes at most")
    try:
        return json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message is not JSON: {error}") from error


def from_plain(kind: type[T], plain: Any, where: str = "") -> T:
    """Build a value of `kind` from parsed JSON.

    Raises:
        ProtocolError: a field is missing, unknown, of the wrong type or out of its range.
    """
    return typing.cast(
        "T", _reader(typing.cast("Hashable", kind))(plain, where or getattr(kind, "__name__", str(kind)))
    )


_Read = Callable[[Any, str], Any]
"""Builds a value from plain data, for which a place is named."""


@cache  # what an annotation means is found out once: a manifest has thousands of values of a few kinds
def _reader(kind: Any) -> _Read:
    """What builds values of a kind."""
    origin = typing.get_origin(kind)
    if (registry := registry_of(kind)) is not None:
        return partial(_build_open, registry)
    if (build := _COMPOUND.get(origin)) is not None:
        return partial(build, typing.get_args(kind))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return partial(_build_dataclass, kind)
    return _SCALARS.get(kind) or partial(_build_nothing, kind)


@cache
def _fields(kind: type) -> dict[str, tuple[_Read, bool]]:
    """How the fields of a dataclass are read, and whether each must be there."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: (
            _reader(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    }


def _build_dataclass(kind: type, plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        raise ProtocolError(f"{where} is {type(plain).__name__}, but must be an object")
    if getattr(kind, "TYPE", None) is not None:
        plain = {key: value for key, value in plain.items() if key != tag_of(kind)}
    fields = _fields(kind)
    if unknown := sorted(plain.keys() - fields.keys()):
        raise ProtocolError(f"{where} has the unknown field {unknown[0]!r:.80}; known are {sorted(fields)}")
    if missing := sorted(name for name, (_, required) in fields.items() if required and name not in plain):
        raise ProtocolError(f"{where} is missing the field {missing[0]!r}")
    values = {name: fields[name][0](value, f"{where}.{name}") for name, value in plain.items()}
    try:
        return kind(**values)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"{where}: {error}") from error


def _build_union(members: tuple[Any, ...], plain: Any, where: str) -> Any:
    if plain is None and type(None) in members:
        return None
    kinds = [member for member in members if member is not type(None)]
    if len(kinds) == 1:
        return _reader(kinds[0])(plain, where)
    tag = plain.get("type") if isinstance(plain, dict) else None
    for kind in kinds:
        if tag is not None and getattr(kind, "TYPE", None) == tag:
            return _reader(kind)(plain, where)
    tags = [getattr(kind, "TYPE", kind) for kind in kinds]
    raise ProtocolError(f"{where} has the type {tag!r:.80}, but must be one of {tags}")


def _build_open(registry: Registry[Any], plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        raise ProtocolError(f"{where} is {type(plain).__name__}, but must be an object")
    name = plain.get(registry.tag)
    if not isinstance(name, str) or name not in registry.names:
        said = (
            f"{where} has the {registry.tag} {name!r:.80}"
            if registry.tag in plain
            else f"{where}.{registry.tag} is missing"
        )
        raise ProtocolError(f"{said}, but must be one of {list(registry.names)}")
    try:
        kind = registry.named(name)
    except ConfigError as error:
        raise ProtocolError(f"{where}: {error}") from error
    return _reader(kind)(plain, where)


def _build_tuple(members: tuple[Any, ...], plain: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(plain, (list, tuple)):
        raise ProtocolError(f"{where} is {type(plain).__name__}, but must be a list")
    if len(members) == 2 and members[1] is ...:
        read = _reader(members[0])
        return tuple([read(item, f"{where}[{place}]") for place, item in enumerate(plain)])
    if len(members) != len(plain):
        raise ProtocolError(f"{where} has {len(plain)} items, but must have {len(members)}")
    pairs = zip(members, plain, strict=True)
    return tuple(_reader(kind)(item, f"{where}[{place}]") for place, (kind, item) in enumerate(pairs))


def _build_mapping(members: tuple[Any, ...], plain: Any, where: str) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise ProtocolError(f"{where} is {type(plain).__name__}, but must be an object")
    read_key, read_item = (_reader(kind) for kind in members)
    return {read_key(key, f"a key of {where}"): read_item(item, f"{where}[{key!r:.80}]") for key, item in plain.items()}


def _build_literal(known: tuple[Any, ...], plain: Any, where: str) -> Any:
    if isinstance(plain, (str, int)) and plain in known:
        return plain
    raise ProtocolError(f"{where} is {plain!r:.80}, but must be one of {list(known)}")


def _build_float(plain: Any, where: str) -> float:
    if not isinstance(plain, (int, float)) or isinstance(plain, bool):
        _build_nothing(float, plain, where)
    number = float(plain) if abs(plain) <= MAX_INTEGER or isinstance(plain, float) else math.inf
    if math.isfinite(number):
        return number
    raise ProtocolError(f"{where} is {plain!r:.80}, but must be a finite number")


def _build_int(plain: Any, where: str) -> int:
    if isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) <= MAX_INTEGER:
        return plain
    return _build_nothing(int, plain, where)


def _build_bool(plain: Any, where: str) -> bool:
    return plain if isinstance(plain, bool) else _build_nothing(bool, plain, where)


def _build_str(plain: Any, where: str) -> str:
    if not isinstance(plain, str):
        _build_nothing(str, plain, where)
    if len(plain) > MAX_TEXT_CHARACTERS:
        raise ProtocolError(f"{where} has {len(plain)} characters, but may have {MAX_TEXT_CHARACTERS} at most")
    if _NO_TEXT.search(plain) is not None:
        raise ProtocolError(f"{where} is {plain!r:.80}, but must be text without NUL and without half characters")
    return plain


def _build_nothing(kind: Any, plain: Any, where: str) -> NoReturn:
    raise ProtocolError(f"{where} is {plain!r:.80}, but must be {getattr(kind, '__name__', kind)}")


_SCALARS: Mapping[Any, _Read] = MappingProxyType(
    {float: _build_float, int: _build_int, bool: _build_bool, str: _build_str}
)
_COMPOUND: Mapping[Any, Callable[[tuple[Any, ...], Any, str], Any]] = MappingProxyType(
    {
        typing.Union: _build_union,
        types.UnionType: _build_union,
        tuple: _build_tuple,
        dict: _build_mapping,
        Mapping: _build_mapping,
        typing.Literal: _build_literal,
    }
)
"""By what an annotation is made with; what it is made of comes first."""
