"""The cells of a network: its blocks, seen as what grows by becoming wider or by being followed by another one.

FedTrans (Lai et al. 2024, section 4.1) transforms a model cell by cell. Here a cell is a block, the first of a section
included. It becomes wider inside, where it has axes of its own, so that nothing else changes its shape. Layers of a
plain chain have none: what they give is the stream of their section, as subnets may leave layers out, so that the
section becomes wider as a whole.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, TypeVar

from subfleet.elastic.axes import Axis
from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.blocks import block_numbers, of_each_block
from subfleet.elastic.families.sections import block_name
from subfleet.elastic.growing import inserted
from subfleet.elastic.identities import starts_as_identity
from subfleet.elastic.network import Family, Network
from subfleet.protocol.errors import ConfigError

__all__ = ["Cell", "can_deepen", "cells_of", "deepened", "parameters_of", "widened"]

_FamilyT = TypeVar("_FamilyT", bound=Family)
_OF_BLOCKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"hidden_widths": ("inner", "filtered", "hidden"), "squeezed_widths": ("squeezed",), "heads": ("heads",)}
)
"""The axes inside a block whose size a setting says, by its last part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell.

    Attributes:
        name: of its block, and of what of the network's tensors and axes is inside.
        section: index of its section.
        number: of its block in the section.
        axes: that are longer where it is wider; none where it has no width of its own. Heads of attention are among
            them where they are of one width in all blocks, which settings can then say.
    """

    name: str
    section: int
    number: int
    axes: tuple[str, ...]


def cells_of(network: Network) -> tuple[Cell, ...]:
    """All cells, in network order."""
    found = []
    for section, numbers in enumerate(block_numbers(network.config)):
        for number in numbers:
            name = block_name(section, number)
            axes = _axes(network, name, section)
            found.append(Cell(name=name, section=section, number=number, axes=axes))
    return tuple(found)


def parameters_of(network: Network) -> dict[str, int]:
    """How many numbers each cell of a network holds, running statistics included, by its name."""
    shapes = network.shapes(network.full_spec())
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return {
        cell.name: sum(size for name, size in sizes.items() if name.startswith(f"{cell.name}."))
        for cell in cells_of(network)
    }


def widened(config: _FamilyT, cells: Collection[str], factor: float) -> _FamilyT:
    """The settings of a network some of whose cells are wider.

    Args:
        config: of the network as it is.
        cells: names of those that become wider.
        factor: by which their axes become longer, above 1: up to the next whole index, and the next whole group of an
            axis that keeps such.

    Raises:
        ConfigError: the factor is not above 1, there is no such cell, or it has no width of its own.
    """
    if factor <= 1:
        raise ConfigError(f"cells are to be wider by a factor of {factor}, but it must be above 1")
    network = network_of(config)
    every = {cell.name: cell for cell in cells_of(network)}
    for name in cells:
        if name not in every:
            raise ConfigError(f"a cell {name!r} is to be wider, but the network has {sorted(every)}")
        if not every[name].axes:
            raise ConfigError(f"cell {name!r} has no width of its own; make it deeper")
    longer = {axis for name in cells for axis in every[name].axes}
    sizes = {name: _longer(axis, factor) if name in longer else axis.size for name, axis in network.axes.items()}
    if _of_sections(config):
        return _with_wider_sections(config, sizes)
    settings: dict[str, Any] = {
        name: _setting(config, network, name, sizes) for name in _OF_BLOCKS if _has(config, name)
    }
    if settings.get("heads", ()) != getattr(config, "heads", ()):
        (settings["head_width"],) = _head_widths(network)  # which their number would say otherwise
    return replace(config, **settings)


def deepened(config: _FamilyT, cell: Cell, count: int = 1) -> _FamilyT:
    """The settings of a network with cells of the sizes of one inserted behind it.

    Raises:
        ConfigError: the network has no such cell, or its family does not number its blocks.
    """
    after = cell.number
    for _ in range(count):
        numbers = block_numbers(config)[cell.section]
        config, after = inserted(config, section=cell.section, after=after), max(numbers) + 1
    return config


def can_deepen(network: Network, cell: Cell) -> bool:
    """Whether one that is inserted behind a cell can start as the identity."""
    deeper = network_of(deepened(network.config, cell))
    (new,) = {block.name for block in deeper.blocks} - {block.name for block in network.blocks}
    return starts_as_identity(deeper, new)


def _axes(network: Network, name: str, section: int) -> tuple[str, ...]:
    if _of_sections(network.config):
        stream = f"section{section}.stream"
        return (stream,) * (stream in network.axes)
    ends = {end for ends in _OF_BLOCKS.values() for end in ends}
    if len(_head_widths(network)) > 1:
        ends -= {"heads"}
    return tuple(axis for axis in network.axes if axis.rpartition(".")[0] == name and axis.rpartition(".")[2] in ends)


def _has(config: Family, name: str) -> bool:
    return name in {field.name for field in fields(config)}


def _of_sections(config: Family) -> bool:
    """Whether blocks have no width of their own, but that of their section."""
    return not any(_has(config, name) for name in _OF_BLOCKS)


def _longer(axis: Axis, factor: float) -> int:
    exact = Fraction(str(factor)) * (axis.size // axis.granularity)
    return math.ceil(exact) * axis.granularity


def _with_wider_sections(config: _FamilyT, sizes: Mapping[str, int]) -> _FamilyT:
    widths = tuple(sizes[f"section{section}.stream"] for section in range(len(config.depths)))
    stem = {"stem_width": sizes["stem"]} if _has(config, "stem_width") else {}
    return replace(config, widths=widths, **stem)


def _setting(config: Family, network: Network, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """What a setting says of each block, in the words that it was said in where nothing of it changes."""
    told: tuple[int, ...] = getattr(config, name)
    each = of_each_block(told, config.depths)
    found, changed = [], False
    for place, cell in enumerate(cells_of(network)):
        own = next((f"{cell.name}.{end}" for end in _OF_BLOCKS[name] if f"{cell.name}.{end}" in network.axes), None)
        before = network.axes[own].size if own else each[place] if each else 0
        found.append(sizes[own] if own else before)
        changed = changed or found[-1] != before
    return tuple(found) if changed else told


def _head_widths(network: Network) -> set[int]:
    return {axis.size for axis in network.axes.values() if axis.kind == "head_dim"}
