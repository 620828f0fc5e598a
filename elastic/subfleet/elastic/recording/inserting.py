"""Inserts the calls of a block into the calls of a network, after or before another block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from subfleet.elastic.recording.expressions import rename_axes
from subfleet.elastic.recording.record import NetworkRecord, RecordedPlan
from subfleet.protocol.errors import ConfigError

Changes = Mapping[str, Callable[[Any], Any]]
"""What becomes of encoded values of some kinds, see `subfleet.elastic.recording.encoding`."""
Span = tuple[int, int, int, int]
"""Of a block: its first call, the call after it, and the numbers of its input and its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a block is inserted.

    Attributes:
        position: number of calls before it.
        value: number of the result that it reads; all later calls read the block's result instead.
    """

    position: int
    value: int


def insert_block(
    plan: RecordedPlan, place: Place, name: str, donor: RecordedPlan, span: Span, names: Changes
) -> RecordedPlan:
    """Insert the calls of a block.

    Args:
        plan: the calls of a network.
        place: where.
        name: of the inserted block.
        donor: the calls with the block; may be the same.
        span: of the block in these calls.
        names: what becomes of its "state" and "size".

    Raises:
        ConfigError: the block of another network reads more of it than its input.
    """
    start, stop, source, out = span
    fresh = count(1 + max(number for call in plan.calls for number in _list_numbers(call)))
    numbers = {source: place.value}
    for call in donor.calls[start:stop]:
        for number in _list_numbers(call):
            if number not in numbers:
                numbers[number] = next(fresh)
    foreign = donor is not plan

    def renumber(own: int | None) -> int | None:
        if foreign and own is not None and own not in numbers:
            raise ConfigError(f"block {name!r} reads more than its input, so it cannot be part of another network")
        return own if own is None else numbers.get(own, own)

    offset = len(plan.constants) if foreign else 0
    changes: Changes = {"value": renumber, "constant": lambda own: own + offset, **names}
    inserted = [rewrite_call(call, changes) for call in donor.calls[start:stop]]
    given = numbers[out]
    later: Changes = {"value": lambda own: given if own == place.value else own}
    following = [rewrite_call(call, later) for call in plan.calls[place.position :]]
    blocks = dict[str, Span]()
    for own, (begin, end, read, result) in plan.blocks.items():
        if begin >= place.position:
            shift = stop - start
            blocks[own] = (begin + shift, end + shift, later["value"](read), later["value"](result))
        else:
            blocks[own] = (begin, end, read, result)
    blocks[name] = (place.position, place.position + stop - start, place.value, given)
    return RecordedPlan(
        calls=[*plan.calls[: place.position], *inserted, *following],
        out=later["value"](plan.out),
        blocks=dict(sorted(blocks.items(), key=lambda item: item[1])),
        constants=[*plan.constants, *(donor.constants if foreign else ())],
    )


def redirect_axis(record: NetworkRecord, block: str, source: str, target: str) -> NetworkRecord:
    """A network in which all that comes after a block of a chain has another axis in place of one.

    Args:
        record: the network.
        block: the block.
        source: the axis that later layers had.
        target: the axis that they have then.
    """
    rename = partial(rename_axes, names={source: target})
    plans = (record.training, record.evaluation)
    later = {
        name
        for plan in plans
        for call in plan.calls[plan.blocks[block][1] :]
        for name in list_contents(call[1:3], "state")
    }
    place = [own.name for own in record.blocks].index(block) + 1
    training, evaluation = (_redirect_calls(plan, block, rename) for plan in plans)
    return replace(
        record,
        tensors=tuple(
            replace(tensor, shape=tuple(rename(tensor.shape))) if tensor.name in later else tensor
            for tensor in record.tensors
        ),
        blocks=(
            *record.blocks[:place],
            *(replace(own, reads=rename(own.reads), gives=rename(own.gives)) for own in record.blocks[place:]),
        ),
        training=training,
        evaluation=evaluation,
    )


def _redirect_calls(plan: RecordedPlan, block: str, rename: Callable[[Any], Any]) -> RecordedPlan:
    stop = plan.blocks[block][1]
    changes: Changes = {"value": lambda number: number, "size": rename, "whole": rename}
    return replace(plan, calls=[*plan.calls[:stop], *(rewrite_call(call, changes) for call in plan.calls[stop:])])


def rewrite_call(call: Sequence[Any], changes: Changes) -> list[Any]:
    """A call with changed values."""
    name, args, kwargs, result, layer = call
    number = changes["value"]
    return [
        name,
        _rewrite(args, changes),
        {key: _rewrite(item, changes) for key, item in kwargs.items()},
        [number(own) for own in result] if isinstance(result, list) else number(result),
        changes.get("state", str)(layer),
    ]


def _rewrite(value: Any, changes: Changes) -> Any:
    if isinstance(value, list):
        return [_rewrite(item, changes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("tuple", "slice", "dict"):
        return {kind: _rewrite(content, changes)}
    return {kind: changes[kind](content)} if kind in changes else value


def _list_numbers(call: Sequence[Any]) -> Iterator[int]:
    """The numbers of a call's results."""
    result = call[3]
    return (number for number in (result if isinstance(result, list) else [result]) if number is not None)


def list_ends(plan: RecordedPlan, block: str) -> tuple[list[int], list[int]]:
    """The results of other calls that a block reads, and its results that other calls read."""
    start, stop, *_ = plan.blocks[block]
    made = {number for call in plan.calls[start:stop] for number in _list_numbers(call)}
    read = [
        number for call in plan.calls[start:stop] for number in list_contents(call[1:3], "value") if number not in made
    ]
    later = {number for call in plan.calls[stop:] for number in list_contents(call[1:3], "value")} | {plan.out}
    return list(dict.fromkeys(read)), sorted(made & later)


def list_unused(plan: RecordedPlan) -> list[list[int]]:
    """For each call, the results that no later call reads."""
    last: dict[int, int] = {}
    for position, call in enumerate(plan.calls):
        last |= dict.fromkeys((*_list_numbers(call), *list_contents(call[1:3], "value")), position)
    last.pop(plan.out, None)
    unused: list[list[int]] = [[] for _ in plan.calls]
    for number, position in last.items():
        unused[position].append(number)
    return unused


def list_contents(value: Any, kind: str) -> Iterator[Any]:
    """Yield what encoded arguments hold of a kind, such as the numbers of "value" or the names of "state"."""
    if isinstance(value, dict):
        for own, content in value.items():
            if own == kind:
                yield content
            else:
                yield from list_contents(content, kind)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from list_contents(item, kind)


def list_own_calls(plan: RecordedPlan, blocks: frozenset[str], names: Changes) -> list[Any]:
    """The calls of a network with only these blocks; equal networks have equal calls.

    Results are numbered in their order, and constants stand for themselves.

    Args:
        plan: the calls of the network.
        blocks: the blocks.
        names: what becomes of sizes.
    """
    skipped = {start: (stop, read, out) for name, (start, stop, read, out) in plan.blocks.items() if name not in blocks}
    same, numbers, calls, position = dict[int, int](), {0: 0}, list[Any](), 0

    def number(own: int | None) -> int | None:
        return None if own is None else numbers.setdefault(same.get(own, own), len(numbers))

    changes: Changes = {"value": number, "constant": lambda own: plan.constants[own], **names}
    while position < len(plan.calls):
        if position in skipped:
            position, read, out = skipped[position]
            same[out] = same.get(read, read)
            continue
        calls.append(rewrite_call(plan.calls[position], changes))
        position += 1
    return [*calls, number(plan.out)]
