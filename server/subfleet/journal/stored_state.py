"""The state of a run as rows: one row for a field, or for each entry of a mapping, so that only changes are saved.

The stored fields follow from `RunState`: all except `live`.
"""

import collections.abc
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import MAX_ROUNDS
from subfleet.protocol.schema import canonical_json, from_plain
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.state import RunState

_NOT_STORED = "live"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """How a field is read.

    Attributes:
        kind: type of the value in a row.
        of_entries: whether each row is an entry of a mapping; else there is one row.
        gather: builds the field's value from the value or the entries.
    """

    kind: Any
    of_entries: bool = False
    gather: Callable[[Any], Any] = lambda value: value


def list_changes(before: RunState, after: RunState) -> Iterator[Change]:
    """The rows in which two states differ; shared values are not visited."""
    for name in _list_parts():
        old, new = getattr(before, name), getattr(after, name)
        if new is old:
            continue
        if isinstance(new, PersistentMap):
            gone: Iterable[str] = (key for key in old.changed(new) if key not in new)
            changed: Iterable[str] = new.changed(old)
        elif isinstance(new, Mapping):
            gone = old.keys() - new.keys()
            changed = [key for key, value in new.items() if key not in old or value is not old[key]]
        elif new != old:
            plain = sorted(new) if isinstance(new, frozenset) else new
            yield Change(part=name, key="", text=canonical_json(plain).decode())
            continue
        else:
            continue
        yield from (Change(part=name, key=key, text=None) for key in gone)
        yield from (Change(part=name, key=key, text=canonical_json(new[key]).decode()) for key in changed)


def build_state(rows: Iterable[tuple[str, str, str]], memory: type) -> RunState:
    """The state in some rows; a field without rows is as in a new run.

    Args:
        rows: part, key and text of each.
        memory: type of the method's memory.

    Raises:
        ProtocolError: a row is no part of a state, or the parts are inconsistent.
    """
    parts, found = _list_parts(), dict[str, Any]()
    for name, key, text in rows:
        part = parts.get(name)
        if part is None:
            raise ProtocolError(f"{name!r:.80} is no part of a state; known are {sorted(parts)}")
        kind: Any = memory | None if part.kind is Any else part.kind
        value = from_plain(kind, json.loads(text), f"{name}[{key!r:.80}]" if key else name)
        if part.of_entries:
            found.setdefault(name, {})[key] = value
        else:
            found[name] = value
    return _check(RunState(**{name: parts[name].gather(value) for name, value in found.items()}))


@cache
def _list_parts() -> Mapping[str, _Part]:
    hints = typing.get_type_hints(RunState)
    return MappingProxyType(
        {one.name: _describe_part(hints[one.name]) for one in fields(RunState) if one.name != _NOT_STORED}
    )


def _describe_part(kind: Any) -> _Part:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is PersistentMap:
        return _Part(kind=members[0], of_entries=True, gather=PersistentMap)
    if origin is collections.abc.Mapping:
        return _Part(kind=members[1], of_entries=True, gather=MappingProxyType)
    if kind == frozenset[str]:
        return _Part(kind=tuple[str, ...], gather=frozenset)
    return _Part(kind=kind)


def _check(state: RunState) -> RunState:
    """Check the consistency of a state."""
    if not 0 <= state.aggregated_round <= state.round <= state.aggregated_round + 1:
        raise ProtocolError(
            f"the run is in round {state.round} after the aggregation of round {state.aggregated_round}"
        )
    counts = (state.round, state.attempt, state.failed_attempts.lost, state.explored_attempt, state.requested_attempt)
    if not all(0 <= count < MAX_ROUNDS for count in counts):
        raise ProtocolError(f"the counts of rounds and attempts are {counts}, but must be 0 or more and below 2^31")
    return state
