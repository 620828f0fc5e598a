"""Recorded networks of other sizes, and with copies of their blocks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, groupby
from string import digits
from typing import Any, TypeVar

from subfleet.elastic.axes import Axis, add_sums
from subfleet.elastic.recording.expressions import compute_size, list_names, rename_axes
from subfleet.elastic.recording.inserting import Changes, Place, insert_block, redirect_axis
from subfleet.elastic.recording.record import NetworkRecord, RecordedBlock, RecordedPlan, RecordedTensor
from subfleet.protocol.errors import ConfigError

_Item = TypeVar("_Item")


def resize_record(record: NetworkRecord, sizes: Mapping[str, int]) -> NetworkRecord:
    """A network with other sizes of axes. Deviations of first weights follow the number of inputs of their layer.

    Raises:
        ConfigError: the size of a tensor with fixed values, such as a table of positions, would change.
    """
    before = {axis.name: axis.size for axis in record.axes}
    whole, resized = (add_sums(record.sums, own) for own in (before, {**before, **sizes}))
    tensors = tuple(_scale_start(tensor, whole, resized) for tensor in record.tensors)
    axes = tuple(replace(axis, size=resized[axis.name]) for axis in record.axes)
    return replace(record, axes=axes, tensors=tensors)


def find_template(record: NetworkRecord, block: str) -> RecordedBlock | None:
    """The block that one after this block would be like: the same one, or if it changes its input, the next one."""
    own = next((known for known in record.blocks if known.name == block), None)
    if own is None:
        return None
    later = [known for known in record.blocks if known.section == own.section and not known.kept]
    if not own.kept:
        return own
    return later[0] if later else own if own.reads == own.gives != "" else None


def copy_block(record: NetworkRecord, block: str) -> tuple[NetworkRecord, str]:
    """A network with one more block right after a block, and the name of the new one; see `find_template`.

    Raises:
        ConfigError: nothing can be copied.
    """
    template = find_template(record, block)
    if template is None:
        raise ConfigError(f"block {block!r} changes the shape of its input, so no copy of it can follow it")
    name, place = _name_copy(record, block), [known.name for known in record.blocks].index(block)
    before = record.blocks[place].gives
    renaming = _Renaming.of(record, template, name, before, later=template.name != block)
    copy = replace(
        template, name=name, kept=False, reads=renaming.size(template.reads), gives=renaming.size(template.gives)
    )
    longer = replace(
        record,
        axes=tuple(_list_axes(record, renaming, copy, before)),
        sums=record.sums
        | {
            renaming.sizes[own]: tuple(tuple(renaming.size(factor) for factor in part) for part in parts)
            for own, parts in record.sums.items()
            if own in renaming.sizes
        },
        tensors=_insert_copies(
            record.tensors,
            lambda tensor: renaming.owns(tensor.name),
            renaming.copy_tensor,
            before=renaming.later,
        ),
        fixed=_insert_copies(
            record.fixed, lambda item: renaming.owns(item[0]), lambda item: [renaming.layer(item[0]), *item[1:]]
        ),
        blocks=(*record.blocks[: place + 1], copy, *record.blocks[place + 1 :]),
        training=_copy_calls(record.training, renaming, block),
        evaluation=_copy_calls(record.evaluation, renaming, block),
        products=_insert_copies(
            record.products,
            lambda product: renaming.owns(product.layer),
            lambda product: replace(
                product,
                result=tuple(map(renaming.size, product.result)),
                summed=tuple(map(renaming.size, product.summed)),
                layer=renaming.layer(product.layer),
            ),
        ),
        whole={
            reason: _insert_copies(places, renaming.owns, renaming.layer) for reason, places in record.whole.items()
        },
    )
    if copy.reads != copy.gives:
        longer = redirect_axis(longer, name, copy.reads, copy.gives)
    return longer, name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renaming:
    """The names in a copy of a block.

    Attributes:
        block: the block.
        name: of the copy.
        sizes: names of its axes and sums in the copy.
        added: axes and sums that nothing outside the block has.
        later: whether the block comes after the copy.
    """

    block: str
    name: str
    sizes: Mapping[str, str]
    added: frozenset[str]
    later: bool

    @classmethod
    def of(cls, record: NetworkRecord, template: RecordedBlock, name: str, before: str, *, later: bool) -> "_Renaming":
        block = template.name
        inside, outside = set[str](), {template.reads, template.gives}
        for tensor in record.tensors:
            (inside if f"{tensor.name}.".startswith(f"{block}.") else outside).update(list_names(tensor.shape))
        for own, parts in record.sums.items():
            (outside if own in outside or own not in inside else inside).update(list_names(parts))
        known = {*(axis.name for axis in record.axes), *record.sums}
        sizes = dict[str, str]()
        for own in sorted(inside - outside):
            renamed = name + own.removeprefix(block) if own.startswith(f"{block}.") else own
            sizes[own] = next(new for new in chain([renamed], _number(renamed)) if new not in known | {*sizes.values()})
        added = frozenset(sizes)
        if template.reads != template.gives:  # a layer of a chain reads what the layer before it gives
            outputs = name + template.gives.removeprefix(block)
            sizes |= {
                template.reads: before,
                template.gives: outputs if outputs not in known else next(_number(outputs)),
            }
        return cls(block=block, name=name, sizes=sizes, added=added, later=later)

    def owns(self, name: str) -> bool:
        """Whether a layer or tensor is in the block."""
        return name == self.block or name.startswith(f"{self.block}.")

    def layer(self, name: str) -> str:
        """The name of a layer or tensor in the copy; others keep theirs."""
        return self.name + name.removeprefix(self.block) if self.owns(name) else name

    def size(self, size: Any) -> Any:
        """A size in the copy."""
        return rename_axes(size, self.sizes)

    def copy_tensor(self, tensor: RecordedTensor) -> RecordedTensor:
        return replace(tensor, name=self.layer(tensor.name), shape=tuple(map(self.size, tensor.shape)))


def _list_axes(record: NetworkRecord, renaming: _Renaming, copy: RecordedBlock, before: str) -> Iterator[Axis]:
    """The axes with those of a copy; the outputs of a layer of a chain are as many as its inputs."""
    copies = _insert_copies(
        record.axes,
        lambda axis: axis.name in renaming.added,
        lambda axis: replace(axis, name=renaming.size(axis.name)),
        before=renaming.later,
    )
    for axis in copies:
        yield axis
        if axis.name == before and copy.reads != copy.gives:
            yield replace(axis, name=copy.gives)


def _copy_calls(plan: RecordedPlan, renaming: _Renaming, block: str) -> RecordedPlan:
    """The calls with those of the template once more; what reads the block's result reads the copy's."""
    _, stop, _, out = plan.blocks[block]
    names: Changes = {"state": renaming.layer, "size": renaming.size, "whole": renaming.size}
    place = Place(position=stop, value=out)
    return insert_block(plan, place, renaming.name, plan, plan.blocks[renaming.block], names)


def _insert_copies(
    items: Sequence[_Item], owns: Callable[[_Item], bool], copy: Callable[[_Item], _Item], *, before: bool = False
) -> tuple[_Item, ...]:
    """The items, with copies of neighbours that are owned right after or before them."""
    copied: list[_Item] = []
    for owned, neighbours in groupby(items, owns):
        own = list(neighbours)
        copies = [*map(copy, own)] if owned else []
        copied += [*copies, *own] if before else [*own, *copies]
    return tuple(copied)


def _name_copy(record: NetworkRecord, block: str) -> str:
    """A name for a copy of a block: the next number in its container, if it has a number."""
    container, _, own = block.rpartition(".")
    prefix = f"{container}." if container else ""
    layers = {tensor.name for tensor in record.tensors} | {item[0] for item in record.fixed}
    layers |= {call[4] for plan in (record.training, record.evaluation) for call in plan.calls}
    siblings = {layer.removeprefix(prefix).partition(".")[0] for layer in layers if layer.startswith(prefix)}
    stem = own.rstrip(digits)
    if stem == own:
        return next(name for name in _number(block) if name.removeprefix(prefix) not in siblings)
    numbers = (name.removeprefix(stem) for name in siblings if name.startswith(stem))
    return f"{prefix}{stem}{1 + max(int(number) for number in numbers if number.isdigit())}"


def _number(name: str) -> Iterator[str]:
    """Names like this one."""
    return (f"{name}_{number}" for number in count(2))


def _scale_start(tensor: RecordedTensor, whole: Mapping[str, int], resized: Mapping[str, int]) -> RecordedTensor:
    shapes = [tuple(compute_size(size, own) for size in tensor.shape) for own in (whole, resized)]
    if tensor.values and shapes[0] != shapes[1]:
        raise ConfigError(
            f"tensor {tensor.name!r} keeps the values that its module gives it, so its size {shapes[0]} cannot change"
        )
    if tensor.role != "weight" or tensor.start is None:
        return tensor
    before, after = (math.prod(shape[1:]) for shape in shapes)
    mean, deviation = tensor.start
    return replace(tensor, start=(mean, deviation * math.sqrt(before / after))) if after != before else tensor
