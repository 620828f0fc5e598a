"""What a record says against its values: all of it, where building it would end with the first."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from subfleet.protocol.errors import SubfleetError

__all__ = ["default_of", "objections"]

_HARMLESS: Mapping[Any, Any] = MappingProxyType({str: "x", int: 2, float: 1.0})
"""What no check that we know refuses, by type."""


def objections(kind: type, values: Mapping[str, Any]) -> Iterator[str]:
    """What a record itself says against its values: one is set aside after the other, so that all are heard.

    Args:
        kind: a frozen dataclass, whose `__post_init__` raises.
        values: of its fields, each of the right type; some may be missing.
    """
    spare, left = _spare_values(kind), dict(values)
    while (text := _objection(kind, spare | left)) is not None:
        yield text
        others = {
            name: _objection(kind, spare | {key: value for key, value in left.items() if key != name})
            for name in left.keys() & spare.keys()
        }
        # A value without which nothing is wrong; else one without which something else is.
        blamed = sorted((said is not None, name) for name, said in others.items() if said != text)
        if not blamed:
            return
        del left[blamed[0][1]]


def _spare_values(kind: type) -> dict[str, Any]:
    """By field what takes the place of a value that is set aside or not there: its default, or a harmless one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    spare = {field.name: default_of(field) for field in dataclasses.fields(kind)}
    spare |= {name: _HARMLESS.get(hints[name], value) for name, value in spare.items() if value is dataclasses.MISSING}
    return {name: value for name, value in spare.items() if value is not dataclasses.MISSING}


def _objection(kind: type, values: Mapping[str, Any]) -> str | None:
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


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """The default of a field; `dataclasses.MISSING` where it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
