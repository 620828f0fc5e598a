"""The blueprint of a recorded network."""

import base64
from collections.abc import Iterator
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.network import Block, MatrixProduct, Role
from subfleet.elastic.recording.record import NetworkRecord
from subfleet.elastic.recording.replaying import ReplayedModule
from subfleet.elastic.recording.silencing import find_silencing


def recorded_blueprint(record: NetworkRecord, *, symbols: int) -> Blueprint:
    """How submodels of a recorded network are built.

    Args:
        record: the network.
        symbols: size of the vocabulary if inputs are tokens; 0 if they are numbers.
    """
    sections = {name: section for section, names in enumerate(record.sections) for name in names}
    first_calls = {name: call for name, (call, *_) in record.training.blocks.items() if name in sections}
    ordered = sorted(first_calls, key=first_calls.__getitem__)
    blocks = tuple(Block(name=name, section=sections[name]) for name in ordered)
    return Blueprint(
        axes=tuple(_list_axes(record)),
        sums=MappingProxyType(record.sums),
        blocks=blocks,
        build=partial(_build, record),
        roles={tensor.name: cast("Role", tensor.role) for tensor in record.tensors},
        products=tuple(
            MatrixProduct(
                result=tuple(_flatten(product.result)),
                summed=tuple(_flatten(product.summed)),
                part=next((name for name in sections if f"{product.layer}.".startswith(f"{name}.")), None),
            )
            for product in record.products
        ),
        positions=MappingProxyType({tensor.name: tensor.positions for tensor in record.tensors}),
        symbols=symbols,
        identities=dict.fromkeys(sorted(find_silencing(record)), "silent"),
        starts={tensor.name: base64.b85decode(tensor.values) or tensor.start for tensor in record.tensors},
        frozen=frozenset(tensor.name for tensor in record.tensors if not tensor.trained),
    )


def _list_axes(record: NetworkRecord) -> Iterator[Axis]:
    for axis in record.axes:
        kind: Any = axis.kind
        yield Axis(
            name=axis.name,
            size=axis.size,
            kind=kind,
            granularity=axis.granularity,
            least=axis.least,
            copied=axis.copied,
        )


def _build(record: NetworkRecord, sizes: Sizes) -> nn.Module:
    names = (*(axis.name for axis in record.axes), *record.sums)
    return ReplayedModule(record, {name: sizes[name] for name in names}, sizes.parts)


def _flatten(sizes: tuple[Any, ...]) -> Iterator[str | int]:
    """The factors of sizes."""
    for size in sizes:
        if isinstance(size, list):
            yield from _flatten(tuple(size[1:]))
        else:
            yield size
