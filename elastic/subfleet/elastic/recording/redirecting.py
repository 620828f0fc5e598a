"""Lets all later layers of a chain read the outputs of a block that was inserted before them."""

from dataclasses import replace
from typing import Any

from subfleet.elastic.recording.inserting import Changes, list_contents, rewrite_call
from subfleet.elastic.recording.record import NetworkRecord, RecordedPlan


def redirect_axis(record: NetworkRecord, block: str, source: str, target: str) -> NetworkRecord:
    """A network whose layers after a block have another axis in place of one.

    Args:
        record: the network.
        block: the block.
        source: the axis that later layers had.
        target: the axis that they have then.
    """

    def rename(size: Any) -> Any:
        if isinstance(size, (list, tuple)):
            return [rename(part) for part in size]
        return target if size == source else size

    later = {
        name
        for plan in (record.training, record.evaluation)
        for call in plan.calls[plan.blocks[block][1] :]
        for name in list_contents(call[1:3], "state")
    }
    place = [own.name for own in record.blocks].index(block) + 1
    return replace(
        record,
        tensors=tuple(
            replace(tensor, shape=tuple(map(rename, tensor.shape))) if tensor.name in later else tensor
            for tensor in record.tensors
        ),
        blocks=(
            *record.blocks[:place],
            *(replace(own, reads=rename(own.reads), gives=rename(own.gives)) for own in record.blocks[place:]),
        ),
        training=_redirect_calls(record.training, block, {"size": rename, "whole": rename}),
        evaluation=_redirect_calls(record.evaluation, block, {"size": rename, "whole": rename}),
    )


def _redirect_calls(plan: RecordedPlan, block: str, changes: Changes) -> RecordedPlan:
    stop, changes = plan.blocks[block][1], {"value": lambda number: number, **changes}
    return replace(plan, calls=[*plan.calls[:stop], *(rewrite_call(call, changes) for call in plan.calls[stop:])])
