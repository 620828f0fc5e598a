"""The cells of a network: its blocks, seen as what grows by becoming wider or by being followed by another one.

FedTrans (Zhu et al. 2024, section 4.1) transforms a model cell by cell. Here a cell is a block, the first of a section
included. It becomes wider inside, where it has axes of its own, so that nothing else changes its shape. Layers of a
plain chain have none: what they give is the stream of their section, as submodels may leave layers out, so that the
section becomes wider as a whole; or, where layers have widths of their own, each by itself.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from subfleet.elastic.axes import Axis
from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.blocks import block_numbers
from subfleet.elastic.families.sections import block_name
from subfleet.elastic.growing import insert_block
from subfleet.elastic.identities import can_be_identity
from subfleet.elastic.network import Family, Network
from subfleet.elastic.resizing import AXES_OF_BLOCKS, has_section_widths, head_widths, resize
from subfleet.protocol.errors import ConfigError

__all__ = [
    "Cell",
    "can_deepen",
    "count_cell_parameters",
    "deepen_cell",
    "find_changed_cells",
    "list_cells",
    "widen_cells",
]

_FamilyT = TypeVar("_FamilyT", bound=Family)


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


def list_cells(network: Network) -> tuple[Cell, ...]:
    """All cells, in network order."""
    found = []
    for section, numbers in enumerate(block_numbers(network.config)):
        for number in numbers:
            name = block_name(section, number)
            axes = _axes(network, name, section)
            found.append(Cell(name=name, section=section, number=number, axes=axes))
    return tuple(found)


def count_cell_parameters(network: Network) -> dict[str, int]:
    """How many numbers each cell of a network holds, running statistics included, by its name."""
    shapes = network.shapes(network.full_architecture())
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return {
        cell.name: sum(size for name, size in sizes.items() if name.startswith(f"{cell.name}."))
        for cell in list_cells(network)
    }


def widen_cells(config: _FamilyT, cells: Collection[str], factor: float) -> _FamilyT:
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
    every = {cell.name: cell for cell in list_cells(network)}
    for name in cells:
        if name not in every:
            raise ConfigError(f"a cell {name!r} is to be wider, but the network has {sorted(every)}")
        if not every[name].axes:
            raise ConfigError(f"cell {name!r} has no width of its own; make it deeper")
    longer = {axis for name in cells for axis in every[name].axes}
    sizes = {name: _lengthen(axis, factor) if name in longer else axis.size for name, axis in network.axes.items()}
    grown: _FamilyT = resize(network, sizes)
    return grown


def deepen_cell(config: _FamilyT, cell: Cell, count: int = 1) -> _FamilyT:
    """The settings of a network with cells of the sizes of one inserted behind it.

    Raises:
        ConfigError: the network has no such cell, or its family does not number its blocks.
    """
    after = cell.number
    for _ in range(count):
        numbers = block_numbers(config)[cell.section]
        config, after = insert_block(config, section=cell.section, after=after), max(numbers) + 1
    return config


def can_deepen(network: Network, cell: Cell) -> bool:
    """Whether one that is inserted behind a cell can start as the identity."""
    deeper = network_of(deepen_cell(network.config, cell))
    (new,) = {block.name for block in deeper.blocks} - {block.name for block in network.blocks}
    return can_be_identity(deeper, new)


def find_changed_cells(parent: Network, grown: Network) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The cells of a network that are wider in one that grew from it, and those behind which that has others."""
    if parent.config == grown.config:
        return (), ()
    before = {cell.name: cell for cell in list_cells(parent)}
    wider, deeper, behind = list[str](), list[str](), ""
    for cell in list_cells(grown):
        known = before.get(cell.name)
        if known is None:
            deeper.append(behind)  # a section's first cell is always there
            continue
        behind = cell.name
        if any(grown.axes[axis].size > parent.axes[axis].size for axis in known.axes if axis in grown.axes):
            wider.append(cell.name)
    return tuple(wider), tuple(dict.fromkeys(deeper))


def _axes(network: Network, name: str, section: int) -> tuple[str, ...]:
    if has_section_widths(network.config):
        stream = f"section{section}.stream"
        return (stream,) * (stream in network.axes)
    ends = {end for ends in AXES_OF_BLOCKS.values() for end in ends}
    if len(head_widths(network)) > 1:
        ends -= {"heads"}
    return tuple(axis for axis in network.axes if axis.rpartition(".")[0] == name and axis.rpartition(".")[2] in ends)


def _lengthen(axis: Axis, factor: float) -> int:
    exact = Fraction(str(factor)) * (axis.size // axis.granularity)
    return math.ceil(exact) * axis.granularity
