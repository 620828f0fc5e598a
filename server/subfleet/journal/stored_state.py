"""The state of a run as rows: one row for a field, or for each entry of a mapping, so that only changes are saved.

The stored fields follow from `RunState`: all except `live`.
"""

import collections.abc
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import MAX_ROUNDS
from subfleet.protocol.schema import canonical_json, from_plain
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.state import RunState

_NOT_STORED = "live"
_Part = tuple[Any, Callable[[Mapping[str, Any]], Any]]
"""How a field is read: the type of the value in a row, and what builds the field's value from the values by key; a
field that is no mapping has one, under ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed row.

    Attributes:
        part: name of a field of `RunState`, or of a kind of record.
        key: of an entry, if the field is a mapping; else empty.
        text: the new value as canonical JSON; None if the entry is deleted.
    """

    part: str
    key: str
    text: str | None


def list_changes(before: RunState, after: RunState) -> Iterator[Change]:
    """The rows in which two states differ; shared values are not visited."""
    for name in _list_parts():
        old, new = getattr(before, name), getattr(after, name)
        if new is old:
            continue
        if isinstance(new, PersistentMap):
            keys: Iterable[str] = dict.fromkeys((*new.find_changed(old), *old.find_changed(new)))
        elif isinstance(new, Mapping):
            keys = [key for key in {**old, **new} if key not in old or key not in new or old[key] is not new[key]]
        else:
            keys = [""] if new != old else []
            new = {"": sorted(new) if isinstance(new, frozenset) else new}
        for key in keys:
            yield build_change(name, key, new[key]) if key in new else Change(part=name, key=key, text=None)


def build_change(part: str, key: str, value: object) -> Change:
    """The row with a new value."""
    return Change(part=part, key=key, text=canonical_json(value).decode())


def build_state(rows: Iterable[tuple[str, str, str]], memory: type) -> RunState:
    """The state in some rows; a field without rows is as in a new run.

    Args:
        rows: part, key and text of each.
        memory: type of the method's memory.

    Raises:
        ProtocolError: a row is not a part of a state, or the parts are inconsistent.
    """
    parts, values = _list_parts(), dict[str, dict[str, Any]]()
    for name, key, text in rows:
        if name not in parts:
            raise ProtocolError(f"{name!r:.80} is not a part of a state; the known parts are {sorted(parts)}")
        kind: Any = memory | None if parts[name][0] is Any else parts[name][0]
        value = from_plain(kind, json.loads(text), f"{name}[{key!r:.80}]" if key else name)
        values.setdefault(name, {})[key] = value
    return _check(RunState(**{name: parts[name][1](entries) for name, entries in values.items()}))


@cache
def _list_parts() -> Mapping[str, _Part]:
    hints = typing.get_type_hints(RunState)
    return MappingProxyType({name: _describe_part(kind) for name, kind in hints.items() if name != _NOT_STORED})


def _describe_part(kind: Any) -> _Part:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is PersistentMap:
        return members[0], PersistentMap
    if origin is collections.abc.Mapping:
        return members[1], MappingProxyType
    if kind == frozenset[str]:
        return tuple[str, ...], lambda values: frozenset(values[""])
    return kind, lambda values: values[""]


def _check(state: RunState) -> RunState:
    """Check the consistency of a state."""
    if not 0 <= state.aggregated_round <= state.round <= state.aggregated_round + 1:
        raise ProtocolError(
            f"the run is in round {state.round}, but the last aggregated round is {state.aggregated_round}"
        )
    counts = (state.round, state.attempt, state.failed_attempts.lost, state.explored_attempt, state.requested_attempt)
    if not all(0 <= count < MAX_ROUNDS for count in counts):
        raise ProtocolError(f"the counts of rounds and attempts are {counts}, but must be 0 or more and below 2^31")
    return state
