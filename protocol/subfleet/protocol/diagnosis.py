"""Settings that a person wrote: everything that is wrong with them is told at once, with the name that may be meant.

`schema.from_plain` stops at the first problem, as what comes from the wire deserves no more. Only where it has refused
what a person wrote does this module look at the rest: it builds every part by the same door, and lets each record check
the values that can be used.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from subfleet.protocol.errors import ConfigError, ProtocolError, SubfleetError
from subfleet.protocol.schema import from_plain, registry_of, tag_of
from subfleet.protocol.suggestion import did_you_mean

__all__ = ["from_written", "problems_with", "refusal_of"]

T = TypeVar("T")

_HARMLESS: Mapping[Any, Any] = MappingProxyType({str: "x", int: 2, float: 1.0})
"""What no check that we know refuses, by type."""


def from_written(kind: type[T], plain: Any, what: str) -> T:
    """Build a value from parsed TOML or JSON that a person wrote; `what` names it in errors, such as a file.

    Raises:
        ConfigError: names every unknown and missing key, and every value of a wrong type or out of its range.
    """
    try:
        return from_plain(kind, plain)
    except (ProtocolError, ConfigError) as error:
        raise refusal_of(what, problems_with(kind, plain) or [str(error)]) from error


def refusal_of(what: str, problems: Sequence[str]) -> ConfigError:
    """One sentence for one problem, a list for several."""
    if len(problems) == 1:
        return ConfigError(f"{what}: {problems[0]}")
    return ConfigError("\n  - ".join([f"{what} has {len(problems)} problems:", *problems]))


def problems_with(kind: Any, plain: Any, where: str = "") -> list[str]:
    """Everything that keeps a value of `kind` from being built; `where` are the keys that lead to it."""
    if plain is None and type(None) in typing.get_args(kind):
        return []
    kind = _chosen(kind, plain)
    members = typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if isinstance(plain, dict):
            return list(_problems_of_record(kind, plain, where))
    elif typing.get_origin(kind) is tuple and members[1:] == (...,) and isinstance(plain, (list, tuple)):
        return [
            text for place, item in enumerate(plain) for text in problems_with(members[0], item, f"{where}[{place}]")
        ]
    elif typing.get_origin(kind) in (dict, Mapping) and isinstance(plain, dict):
        return [text for key, item in plain.items() for text in problems_with(members[1], item, f"{where}.{key}")]
    return _problem_of_value(kind, plain, where)


def _chosen(kind: Any, plain: Any) -> Any:
    """The member of a union that is meant; the union itself where that cannot be told."""
    if (registry := registry_of(kind)) is not None:
        name = plain.get(registry.tag) if isinstance(plain, dict) else None
        return registry.get(name, kind) if isinstance(name, str) else kind
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    if len(members) == 1:
        return _chosen(members[0], plain)
    tag = plain.get("type") if isinstance(plain, dict) else None
    return next((member for member in members if tag is not None and getattr(member, "TYPE", None) == tag), kind)


def _problem_of_value(kind: Any, plain: Any, where: str) -> list[str]:
    try:
        from_plain(kind, plain, where or "it")
    except ProtocolError as error:
        return [f"{error}{_meant(kind, plain)}"]
    return []


def _meant(kind: Any, plain: Any) -> str:
    """What a name that is one of several may stand for."""
    members = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        name, known = plain, [member for member in members if isinstance(member, str)]
    elif (registry := registry_of(kind)) is not None:
        name, known = plain.get(registry.tag) if isinstance(plain, dict) else None, list(registry.names)
    else:
        name = plain.get("type") if isinstance(plain, dict) else None
        known = [member.TYPE for member in members if hasattr(member, "TYPE")]
    return did_you_mean(name, known) if isinstance(name, str) and name not in known else ""


def _problems_of_record(kind: type, plain: Mapping[str, Any], where: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    inside = f"{where}." if where else ""
    values = {}
    for key, value in plain.items():
        if key in fields:
            problems = problems_with(hints[key], value, f"{inside}{key}")
            yield from problems
            if not problems:
                values[key] = from_plain(hints[key], value)
        elif key != tag_of(kind) or not hasattr(kind, "TYPE"):
            meant = did_you_mean(key, fields) or f"; known are {sorted(fields)}"
            yield f"{inside}{key} is an unknown key{meant}"
    for name, field in fields.items():
        if name not in plain and _default(field) is dataclasses.MISSING:
            yield f"{inside}{name} is missing, but must be there"
    yield from (f"{where}: {text}" if where else text for text in _refusals(kind, hints, values))


def _refusals(kind: type, hints: Mapping[str, Any], values: dict[str, Any]) -> Iterator[str]:
    """What the record itself says against its values: one is set aside after the other, so that all are heard."""
    spare = _spare_values(kind, hints)
    while (text := _refusal(kind, spare | values)) is not None:
        yield text
        others = {
            name: _refusal(kind, spare | {key: value for key, value in values.items() if key != name})
            for name in values.keys() & spare.keys()
        }
        # A value without which nothing is wrong; else one without which something else is.
        blamed = sorted((said is not None, name) for name, said in others.items() if said != text)
        if not blamed:
            return
        del values[blamed[0][1]]


def _spare_values(kind: type, hints: Mapping[str, Any]) -> dict[str, Any]:
    """By field what takes the place of a value that is set aside or not there: its default, or a harmless one."""
    spare = {field.name: _default(field) for field in dataclasses.fields(kind)}
    spare |= {name: _HARMLESS.get(hints[name], value) for name, value in spare.items() if value is dataclasses.MISSING}
    return {name: value for name, value in spare.items() if value is not dataclasses.MISSING}


def _refusal(kind: type, values: Mapping[str, Any]) -> str | None:
    record: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(record, name, value)
    try:
        getattr(record, "__post_init__", lambda: None)()
    except (ValueError, OverflowError, SubfleetError) as error:
        return str(error)
    except AttributeError:  # it looked at a value that is not there: nothing more can be said
        return None
    return None


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
