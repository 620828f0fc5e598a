"""The union of recorded networks: the smallest network that has all of them as submodels.

The networks are sizes of one piece of code: their layers have the same names and make the same calls, with other widths
and other numbers of blocks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from subfleet.elastic.recording.expressions import list_names, rename_axes
from subfleet.elastic.recording.growing import resize_record
from subfleet.elastic.recording.inserting import (
    Changes,
    Place,
    insert_block,
    list_contents,
    list_own_calls,
    redirect_axis,
    rewrite_call,
)
from subfleet.elastic.recording.record import NetworkRecord, RecordedBlock, RecordedPlan, pack_record
from subfleet.protocol.errors import ConfigError


def unite_records(records: Sequence[NetworkRecord]) -> NetworkRecord:
    """The smallest network with every axis as large, and every block, as in any of these.

    Raises:
        ConfigError: a block has no neighbour in the other networks, or the networks compute differently.
    """
    union = max(records, key=lambda record: len(record.blocks))  # the first of several
    for record in records:
        for block in record.blocks:
            if all(own.name != block.name for own in union.blocks):
                union = _add_block(union, record, block)
    sizes = dict[str, int]()
    for record in records:
        for name, size in _list_sizes(union, record).items():
            sizes[name] = max(size, sizes.get(name, 0))
    union = resize_record(union, sizes)
    for record in records:
        _check_calls(union, record)
    used = {name for tensor in union.tensors for name in list_names(tensor.shape, union.sums)}
    if unused := [axis.name for axis in union.axes if axis.name not in used]:
        raise ConfigError(
            f"the networks have no union, because only one of them has the axis {unused[0]!r} for layers that all have"
        )
    if len({record.loss and pack_record(record.loss) for record in records}) > 1:
        raise ConfigError("the networks have no union, because their own losses differ; give all of them the same one")
    whole = {reason for record in records for reason in record.whole}
    places = {reason: {place for own in records for place in own.whole.get(reason, ())} for reason in sorted(whole)}
    return _sort_record(replace(union, whole={reason: tuple(sorted(own)) for reason, own in places.items()}))


def _list_sizes(union: NetworkRecord, record: NetworkRecord) -> dict[str, int]:
    """The size of each axis in a network; a layer of a chain that it lacks passes its input on."""
    sizes, own = {axis.name: axis.size for axis in record.axes}, {block.name for block in record.blocks}
    for block in union.blocks:
        if block.name not in own and block.reads != block.gives and block.reads in sizes:
            sizes[block.gives] = sizes[block.reads]
    return sizes


def _add_block(union: NetworkRecord, record: NetworkRecord, block: RecordedBlock) -> NetworkRecord:
    """A network with a block of another one, beside a block that both have."""
    name, known_blocks = block.name, [own.name for own in union.blocks]
    section = [own.name for own in record.blocks if own.section == block.section]
    index = section.index(name)
    before = next((own for own in reversed(section[:index]) if own in known_blocks), "")
    after = next((own for own in section[index:] if own in known_blocks), "")
    if not before and not after:
        raise ConfigError(
            f"a network has the block {name!r}, but another one has no block in that part, so they have no union; give "
            "each network a block there"
        )
    (beside,) = (own for own in union.blocks if own.name == (before or after))
    place_of_block = known_blocks.index(beside.name) + bool(before)
    added = replace(block, section=beside.section)
    keep: Changes = {}
    plans = []
    for plan, donor in ((union.training, record.training), (union.evaluation, record.evaluation)):
        start, stop, source, out = plan.blocks[before or after]
        place = Place(position=stop, value=out) if before else Place(position=start, value=source)
        plans.append(insert_block(plan, place, name, donor, donor.blocks[name], keep))
    known, prefix = {axis.name for axis in union.axes}, f"{name}."
    own = tuple(tensor for tensor in record.tensors if tensor.name.startswith(prefix))
    longer = replace(
        union,
        axes=(*union.axes, *(axis for axis in record.axes if axis.name not in known)),
        sums={**record.sums, **union.sums},
        tensors=(*union.tensors, *own),
        fixed=(*union.fixed, *(item for item in record.fixed if item[0].startswith(prefix))),
        blocks=(*union.blocks[:place_of_block], added, *union.blocks[place_of_block:]),
        training=plans[0],
        evaluation=plans[1],
        products=(*union.products, *(own for own in record.products if f"{own.layer}.".startswith(prefix))),
    )
    return redirect_axis(longer, name, block.reads, block.gives) if block.reads != block.gives else longer


def _check_calls(union: NetworkRecord, record: NetworkRecord) -> None:
    """Check that a network is what the union computes with its blocks."""
    kept = (block.name for block in union.blocks if block.kept)
    blocks, passed = frozenset([*(block.name for block in record.blocks), *kept]), dict[str, str]()
    for block in union.blocks:
        if block.name not in blocks and block.reads != block.gives:
            passed[block.gives] = passed.get(block.reads, block.reads)

    rename = partial(rename_axes, names=passed)
    for mode in ("training", "evaluation"):
        calls = list_own_calls(getattr(union, mode), blocks, {"size": rename, "whole": rename})
        own = list_own_calls(getattr(record, mode), blocks, {})
        if calls == own:
            continue
        odd = next((call for call, other in zip(own, calls, strict=False) if call != other), own[-1])
        where = f"layer {odd[4]!r} calls {odd[0]} " if isinstance(odd, list) else "the result is computed "
        raise ConfigError(
            f"the networks have no union, because in one of them {where}differently; use networks of the same code "
            "that differ in widths and numbers of blocks"
        )


def _sort_record(record: NetworkRecord) -> NetworkRecord:
    """The same network, so that equal unions have equal records.

    Tensors are in the order of their use, axes in that of tensors, and results in that of calls.
    """
    calls = (*record.training.calls, *record.evaluation.calls)
    used = list(dict.fromkeys(name for call in calls for name in list_contents(call[1:3], "state")))
    tensors = sorted(record.tensors, key=lambda tensor: used.index(tensor.name))
    axes = list(dict.fromkeys(name for tensor in tensors for name in list_names(tensor.shape, record.sums)))
    layers = list(dict.fromkeys(call[4] for call in calls))
    return replace(
        record,
        axes=tuple(sorted(record.axes, key=lambda axis: axes.index(axis.name))),
        sums=dict(sorted(record.sums.items())),
        tensors=tuple(tensors),
        fixed=tuple(sorted(record.fixed, key=lambda item: str(item[0]))),
        training=_number_results(record.training),
        evaluation=_number_results(record.evaluation),
        products=tuple(sorted(record.products, key=lambda product: layers.index(product.layer))),
    )


def _number_results(plan: RecordedPlan) -> RecordedPlan:
    numbers: dict[int | None, int | None] = {None: None, 0: 0}
    for call in plan.calls:
        for number in call[3] if isinstance(call[3], list) else [call[3]]:
            numbers.setdefault(number, len(numbers) - 1)
    changes: Changes = {"value": numbers.__getitem__}
    return RecordedPlan(
        calls=[rewrite_call(call, changes) for call in plan.calls],
        out=changes["value"](plan.out),
        blocks={
            name: (start, stop, changes["value"](source), changes["value"](out))
            for name, (start, stop, source, out) in plan.blocks.items()
        },
        constants=plan.constants,
    )
