"""The union of recorded networks: the smallest network that has all of them as submodels.

The networks are sizes of one piece of code: their layers have the same names and make the same calls, with other widths
and other numbers of blocks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from subfleet.elastic.recording.growing import resize_record
from subfleet.elastic.recording.inserting import Changes, Place, insert_block, list_own_calls
from subfleet.elastic.recording.record import NetworkRecord
from subfleet.protocol.errors import ConfigError

_Item = TypeVar("_Item")


def unite_records(records: Sequence[NetworkRecord]) -> NetworkRecord:
    """The smallest network with every axis as large, and every block, as in any of these.

    Raises:
        ConfigError: a block has no neighbour in the other networks, or the networks compute differently.
    """
    union = max(records, key=lambda record: len(record.training.blocks))  # the first of several
    for record in records:
        for section in record.sections:
            for name in section:
                if name not in union.training.blocks:
                    union = _add_block(union, record, section, name)
    sizes = dict[str, int]()
    for record in records:
        for axis in record.axes:
            sizes[axis.name] = max(axis.size, sizes.get(axis.name, 0))
    union = resize_record(union, sizes)
    for record in records:
        _check_calls(union, record)
    return union


def _add_block(union: NetworkRecord, record: NetworkRecord, section: tuple[str, ...], name: str) -> NetworkRecord:
    """A network with a block of another one, beside a block that both have."""
    index = section.index(name)
    before = next((own for own in reversed(section[:index]) if own in union.training.blocks), "")
    after = next((own for own in section[index:] if own in union.training.blocks), "")
    if not before and not after:
        raise ConfigError(
            f"a network has the block {name!r}, but another one has no block in that part, so they have no union; give "
            "each network a block there"
        )
    keep: Changes = {}
    plans = []
    for plan, donor in ((union.training, record.training), (union.evaluation, record.evaluation)):
        start, stop, source, out = plan.blocks[before or after]
        place = Place(position=stop, value=out) if before else Place(position=start, value=source)
        plans.append(insert_block(plan, place, name, donor, donor.blocks[name], keep))
    known, prefix = {axis.name for axis in union.axes}, f"{name}."
    own = tuple(tensor for tensor in record.tensors if tensor.name.startswith(prefix))
    return replace(
        union,
        axes=(*union.axes, *(axis for axis in record.axes if axis.name not in known)),
        sums={**record.sums, **union.sums},
        tensors=(*union.tensors, *own),
        fixed=(*union.fixed, *(item for item in record.fixed if item[0].startswith(prefix))),
        sections=tuple(
            _insert(names, name, before or after, later=bool(before)) if (before or after) in names else names
            for names in union.sections
        ),
        training=plans[0],
        evaluation=plans[1],
        products=(*union.products, *(own for own in record.products if f"{own.layer}.".startswith(prefix))),
    )


def _insert(items: tuple[_Item, ...], item: _Item, beside: _Item, *, later: bool) -> tuple[_Item, ...]:
    position = items.index(beside) + later
    return (*items[:position], item, *items[position:])


def _check_calls(union: NetworkRecord, record: NetworkRecord) -> None:
    """Check that a network is what the union computes with its blocks."""
    blocks = frozenset(record.training.blocks)
    for mode in ("training", "evaluation"):
        calls, own = (list_own_calls(getattr(each, mode), blocks) for each in (union, record))
        if calls == own:
            continue
        odd = next((call for call, other in zip(own, calls, strict=False) if call != other), own[-1])
        where = f"layer {odd[4]!r} calls {odd[0]} " if isinstance(odd, list) else "the result is computed "
        raise ConfigError(
            f"the networks have no union, because in one of them {where}differently; use networks of the same code "
            "that differ in widths and numbers of blocks"
        )
