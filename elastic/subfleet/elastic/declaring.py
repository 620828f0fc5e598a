"""Declares an elastic network from its record."""

import base64
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from subfleet.elastic.axes import Dim, Product, add_sums
from subfleet.elastic.network import Family, Identity, Network, Role, TensorDecl
from subfleet.elastic.parts import Block, Cell, MatrixProduct
from subfleet.elastic.recording.expressions import compute_size, list_names
from subfleet.elastic.recording.functions import list_forms
from subfleet.elastic.recording.record import NetworkRecord, RecordedBlock, RecordedTensor
from subfleet.elastic.recording.silencing import find_passing, find_silencing

_USUAL_GROUP = 4
_READING_INPUT = list_forms("relu6", "hardtanh", "hardswish", "silu")
"""Activations whose slope does not follow from their output."""


def declare(config: Family, record: NetworkRecord) -> Network:
    """The declaration of a recorded network.

    Args:
        config: its settings.
        record: the network.
    """
    whole = add_sums(record.sums, {axis.name: axis.size for axis in record.axes})
    calls = {call[0] for call in record.training.calls}
    grouped = "torch.nn.functional.group_norm" in calls
    groups = [axis.granularity for axis in record.axes if grouped and axis.kind == "channel"]
    identities = dict(_list_identities(record))
    return Network(
        config=config,
        axes=MappingProxyType({axis.name: axis for axis in record.axes}),
        sums=MappingProxyType(record.sums),
        blocks=tuple(_declare_block(block) for block in record.blocks if not block.kept),
        cells=tuple(_list_cells(record, identities)),
        tensors=MappingProxyType(
            {tensor.name: _declare_tensor(tensor, whole, _find_part(record, tensor.name)) for tensor in record.tensors}
        ),
        products=tuple(
            MatrixProduct(
                result=tuple(_flatten(product.result)),
                summed=tuple(_flatten(product.summed)),
                part=_find_part(record, product.layer),
            )
            for product in record.products
        ),
        kept_of_norms=3 if calls & _READING_INPUT else 2,
        group_size=max(groups, default=_USUAL_GROUP),
        symbols=record.symbols,
        identities=MappingProxyType(identities),
    )


def _declare_block(block: RecordedBlock) -> Block:
    changes = block.reads != block.gives
    return Block(
        name=block.name,
        section=block.section,
        reads=block.reads if changes else "",
        gives=block.gives if changes else "",
    )


def _list_cells(record: NetworkRecord, identities: Mapping[str, Identity]) -> Iterator[Cell]:
    """All blocks, with the axes that no other layer has; a layer of a chain has none, so it has that of its outputs."""
    users: dict[str, set[str]] = {axis.name: set() for axis in record.axes}
    for tensor in record.tensors:
        for name in list_names(tensor.shape, record.sums):
            users[name].add(tensor.name)
    copied = [
        axis.name for axis in record.axes if axis.copied and not axis.evenly and axis.kind not in ("class", "kernel")
    ]
    silent = [name for name, kind in identities.items() if kind == "silent"]
    residual = {block.gives for block in record.blocks if any(name.startswith(f"{block.name}.") for name in silent)}
    computed = {(tensor.name, tensor.shape[0]) for tensor in record.tensors if isinstance(tensor.shape[0], str)}
    for block in record.blocks:
        prefix = f"{block.name}."
        inner = tuple(axis for axis in copied if all(name.startswith(prefix) for name in users[axis]))
        computes = any(name.startswith(prefix) and axis == block.gives for name, axis in computed)
        outputs = (block.gives,) if block.gives in copied and block.gives not in residual and computes else ()
        yield Cell(name=block.name, section=block.section, axes=inner or outputs)


def _find_part(record: NetworkRecord, name: str) -> str | None:
    """The skippable block that a tensor or layer is in."""
    return next(
        (block.name for block in record.blocks if not block.kept and f"{name}.".startswith(f"{block.name}.")), None
    )


def _declare_tensor(tensor: RecordedTensor, whole: Mapping[str, int], part: str | None) -> TensorDecl:
    start = base64.b85decode(tensor.values) or tensor.start
    return TensorDecl(
        name=tensor.name,
        shape=tuple(compute_size(size, whole) for size in tensor.shape),
        axes=tuple(map(_tie, tensor.shape)),
        part=part,
        role=cast("Role", tensor.role),
        positions=tensor.positions,
        start=start,
        frozen=not tensor.trained,
    )


def _tie(size: Any) -> Dim:
    """What a dimension of this size is tied to."""
    if isinstance(size, int):
        return None
    return size if isinstance(size, str) else Product(factors=tuple(_flatten(size[1:])))


def _flatten(sizes: tuple[Any, ...]) -> Iterator[str | int]:
    """The factors of sizes."""
    for size in sizes:
        if isinstance(size, list):
            yield from _flatten(tuple(size[1:]))
        else:
            yield size


def _list_identities(record: NetworkRecord) -> Iterator[tuple[str, Identity]]:
    for name in sorted(find_silencing(record)):
        yield name, "silent"
    for name in sorted(find_passing(record)):
        yield name, "passing"
