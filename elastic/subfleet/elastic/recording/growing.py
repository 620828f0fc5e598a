"""Recorded networks of other sizes, and with copies of their blocks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, groupby
from typing import Any, TypeVar

from subfleet.elastic.axes import add_sums
from subfleet.elastic.recording.inserting import Changes, Place, insert_block
from subfleet.elastic.recording.record import NetworkRecord, RecordedPlan, RecordedTensor
from subfleet.elastic.recording.sizes import compute_size
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


def copy_block(record: NetworkRecord, block: str) -> tuple[NetworkRecord, str]:
    """A network with a copy of a block right after it, and the name of the copy."""
    name = _name_copy(record, block)
    renaming = _Renaming.of(record, block, name)
    return replace(
        record,
        axes=_insert_copies(
            record.axes,
            lambda axis: axis.name in renaming.sizes,
            lambda axis: replace(axis, name=renaming.size(axis.name)),
        ),
        sums=record.sums
        | {
            renaming.sizes[own]: tuple(tuple(renaming.size(factor) for factor in part) for part in parts)
            for own, parts in record.sums.items()
            if own in renaming.sizes
        },
        tensors=_insert_copies(record.tensors, lambda tensor: renaming.owns(tensor.name), renaming.copy_tensor),
        fixed=_insert_copies(
            record.fixed, lambda item: renaming.owns(item[0]), lambda item: [renaming.layer(item[0]), *item[1:]]
        ),
        sections=tuple(_insert_copies(names, lambda own: own == block, lambda _: name) for names in record.sections),
        training=_copy_calls(record.training, renaming),
        evaluation=_copy_calls(record.evaluation, renaming),
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
    ), name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renaming:
    """The names in a copy of a block.

    Attributes:
        block: the block.
        name: of the copy.
        sizes: names of its axes and sums in the copy.
    """

    block: str
    name: str
    sizes: Mapping[str, str]

    @classmethod
    def of(cls, record: NetworkRecord, block: str, name: str) -> "_Renaming":
        inside, outside = set[str](), set[str]()
        for tensor in record.tensors:
            (inside if f"{tensor.name}.".startswith(f"{block}.") else outside).update(_list_names(tensor.shape))
        for own, parts in record.sums.items():
            (outside if own in outside or own not in inside else inside).update(_list_names(parts))
        known = {*(axis.name for axis in record.axes), *record.sums}
        sizes = dict[str, str]()
        for own in sorted(inside - outside - {"*", "+"}):
            renamed = name + own.removeprefix(block) if own.startswith(f"{block}.") else own
            sizes[own] = next(new for new in chain([renamed], _number(renamed)) if new not in known | {*sizes.values()})
        return cls(block=block, name=name, sizes=sizes)

    def owns(self, name: str) -> bool:
        """Whether a layer or tensor is in the block."""
        return name == self.block or name.startswith(f"{self.block}.")

    def layer(self, name: str) -> str:
        """The name of a layer or tensor in the copy; others keep theirs."""
        return self.name + name.removeprefix(self.block) if self.owns(name) else name

    def size(self, size: Any) -> Any:
        """A size in the copy."""
        if isinstance(size, (list, tuple)):
            return [self.size(part) for part in size]
        return self.sizes.get(size, size)

    def copy_tensor(self, tensor: RecordedTensor) -> RecordedTensor:
        return replace(tensor, name=self.layer(tensor.name), shape=tuple(map(self.size, tensor.shape)))


def _copy_calls(plan: RecordedPlan, renaming: _Renaming) -> RecordedPlan:
    """The calls with those of the block once more; what reads its result reads the copy's."""
    span = plan.blocks[renaming.block]
    place = Place(position=span[1], value=span[3])
    names: Changes = {"state": renaming.layer, "size": renaming.size}
    return insert_block(plan, place, renaming.name, plan, span, names)


def _insert_copies(
    items: Sequence[_Item], owns: Callable[[_Item], bool], copy: Callable[[_Item], _Item]
) -> tuple[_Item, ...]:
    """The items, with copies of neighbours that are owned right after them."""
    copied: list[_Item] = []
    for owned, neighbours in groupby(items, owns):
        own = list(neighbours)
        copied += [*own, *map(copy, own)] if owned else own
    return tuple(copied)


def _name_copy(record: NetworkRecord, block: str) -> str:
    """A name for a copy of a block: the next number in its container, if it has a number."""
    container, _, own = block.rpartition(".")
    prefix = f"{container}." if container else ""
    layers = {tensor.name for tensor in record.tensors} | {item[0] for item in record.fixed}
    layers |= {call[4] for plan in (record.training, record.evaluation) for call in plan.calls}
    siblings = {layer.removeprefix(prefix).partition(".")[0] for layer in layers if layer.startswith(prefix)}
    if own.isdigit():
        return f"{prefix}{1 + max(int(name) for name in siblings if name.isdigit())}"
    return next(name for name in _number(block) if name.removeprefix(prefix) not in siblings)


def _number(name: str) -> Iterator[str]:
    """Names like this one."""
    return (f"{name}_{number}" for number in count(2))


def _list_names(sizes: Any) -> Iterator[str]:
    """The axes and sums in sizes."""
    if isinstance(sizes, str):
        yield sizes
    elif isinstance(sizes, (list, tuple)):
        for size in sizes:
            yield from _list_names(size)


def _scale_start(tensor: RecordedTensor, whole: Mapping[str, int], resized: Mapping[str, int]) -> RecordedTensor:
    shapes = [tuple(compute_size(size, own) for size in tensor.shape) for own in (whole, resized)]
    if tensor.values and shapes[0] != shapes[1]:
        raise ConfigError(
            f"tensor {tensor.name!r} keeps the values that its module gives it, so its size {shapes[0]} cannot change"
        )
    if tensor.role != "weight":
        return tensor
    before, after = (math.prod(shape[1:]) for shape in shapes)
    mean, deviation = tensor.start
    return replace(tensor, start=(mean, deviation * math.sqrt(before / after))) if after != before else tensor
