"""Networks that grow block by block: an inserted block, wider cells, deeper cells.

A block is identified by its section and a number, not by its position. An inserted block gets a number that its section
has not used, so all other tensors, axes and blocks keep their names in the deeper network.

FedTrans (Zhu et al. 2024, section 4.1) transforms a model cell by cell. Here a cell is a block, including the first of
a section. A cell becomes wider along its inner axes, so that no other shape changes. Layers of a plain chain have none:
their outputs are the stream of their section, because submodels may leave layers out. The whole section then becomes
wider, or, where layers have widths of their own, each layer by itself.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar, cast

from subfleet.elastic.axes import Axis
from subfleet.elastic.building import network_of
from subfleet.elastic.explicit import ExplicitFamily
from subfleet.elastic.families.records.blocks import (
    OF_BLOCKS,
    OF_SECTIONS_OR_BLOCKS,
    block_numbers,
    encode_block_numbers,
    expand_to_blocks,
)
from subfleet.elastic.families.sections import block_name
from subfleet.elastic.identities import can_be_identity
from subfleet.elastic.network import Family, Network
from subfleet.elastic.resizing import AXES_OF_BLOCKS, has_section_widths, has_setting, head_widths, resize
from subfleet.protocol.errors import ConfigError

_FamilyT = TypeVar("_FamilyT", bound=Family)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell.

    Attributes:
        name: name of its block and prefix of its tensors and inner axes.
        section: index of its section.
        axes: axes that become longer when it is widened; empty if it has no width of its own. Heads of attention are
            included if all blocks have heads of one width, which settings can then express.
    """

    name: str
    section: int
    axes: tuple[str, ...]


def list_cells(network: Network) -> tuple[Cell, ...]:
    """All cells, in network order."""
    if isinstance(network.config, ExplicitFamily):
        return tuple(
            Cell(name=block.name, section=block.section, axes=_inner_axes(network, block.name))
            for block in network.blocks
        )
    cells = []
    for section, numbers in enumerate(block_numbers(network.config)):
        for number in numbers:
            name = block_name(section, number)
            cells.append(Cell(name=name, section=section, axes=_cell_axes(network, name, section)))
    return tuple(cells)


def count_cell_parameters(network: Network) -> dict[str, int]:
    """The parameters of each cell by its name, running statistics included."""
    shapes = network.shapes(network.full_architecture())
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return {
        cell.name: sum(size for name, size in sizes.items() if name.startswith(f"{cell.name}."))
        for cell in list_cells(network)
    }


def insert_block(config: _FamilyT, *, section: int, after: int) -> _FamilyT:
    """The settings of a network with one more block, numbered one above the largest number of its section.

    A section's first block stays first, because it reads the output of the previous section, which may be wider or
    halved, and no submodel leaves it out. The new block can be left out. It has the width of its section, or of the
    preceding layer if each layer has its own width. Appended to a section with counted blocks, it gives the
    settings of a network that was as deep from the start.

    With its own first weights, the deeper network computes the same as before if blocks start as the identity, as in
    `Mlp`, `PreactResNet` and the transformers. `subfleet.elastic.identities` does this for most other families.

    Args:
        config: settings of the network.
        section: index of the section.
        after: number of the block that the new one follows; the new one has its sizes.

    Raises:
        ConfigError: there is no such section or block, or the family does not number its blocks.
    """
    if not has_setting(config, "block_numbers"):
        raise ConfigError(
            f"family {config.TYPE!r} has no setting block_numbers, so no block can be inserted into its networks"
        )
    numbers, depths = block_numbers(config), config.depths
    if not 0 <= section < len(depths):
        raise ConfigError(
            f"a block is to be inserted into section {section}, but the network has sections 0 to {len(depths) - 1}"
        )
    own = numbers[section]
    if after not in own:
        raise ConfigError(
            f"a block is to be inserted after number {after} of section {section}, which has the numbers {list(own)}"
        )
    position = own.index(after) + 1
    grown = (*own[:position], max(own) + 1, *own[position:])
    return replace(
        config,
        depths=(*depths[:section], len(grown), *depths[section + 1 :]),
        block_numbers=encode_block_numbers((*numbers[:section], grown, *numbers[section + 1 :])),
        **_repeat_sizes(config, sum(depths[:section]) + position),
    )


def widen_cells(config: _FamilyT, cells: Collection[str], factor: float) -> _FamilyT:
    """The settings of a network in which some cells are wider.

    Args:
        config: settings of the network.
        cells: names of the cells to widen.
        factor: factor of the axis lengths, above 1; rounded up to whole indices, or to whole groups of an axis with
            groups.

    Raises:
        ConfigError: the factor is not above 1, or a cell does not exist or has no width of its own.
    """
    if factor <= 1:
        raise ConfigError(f"cells are widened by a factor of {factor}, but it must be above 1")
    network = network_of(config)
    known = {cell.name: cell for cell in list_cells(network)}
    for name in cells:
        if name not in known:
            raise ConfigError(f"cell {name!r} is to be widened, but the network has the cells {sorted(known)}")
        if not known[name].axes:
            raise ConfigError(f"cell {name!r} has no width of its own; deepen it instead")
    longer = {axis for name in cells for axis in known[name].axes}
    sizes = {name: _lengthen(axis, factor) if name in longer else axis.size for name, axis in network.axes.items()}
    grown: _FamilyT = resize(network, sizes)
    return grown


def deepen_cell(config: _FamilyT, cell: Cell, count: int = 1) -> _FamilyT:
    """The settings of a network with cells of the same sizes inserted after a cell.

    Raises:
        ConfigError: the network has no such cell, or its family does not number its blocks.
    """
    grown: Any = config
    if isinstance(grown, ExplicitFamily):
        last = cell.name
        for _ in range(count):
            grown, last = grown.with_copy(last)
        return cast("_FamilyT", grown)
    numbers = block_numbers(config)[cell.section]
    after = next((number for number in numbers if block_name(cell.section, number) == cell.name), -1)
    for _ in range(count):
        newest = max(block_numbers(config)[cell.section]) + 1
        config, after = insert_block(config, section=cell.section, after=after), newest
    return config


def can_deepen(network: Network, cell: Cell) -> bool:
    """Whether a cell inserted after this one can start as the identity."""
    deeper = network_of(deepen_cell(network.config, cell))
    (new,) = {block.name for block in deeper.blocks} - {block.name for block in network.blocks}
    return can_be_identity(deeper, new)


def find_changed_cells(parent: Network, grown: Network) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The cells that are wider in a network that grew from a parent, and the cells that new ones follow in it."""
    if parent.config == grown.config:
        return (), ()
    before = {cell.name: cell for cell in list_cells(parent)}
    wider, deeper, previous = list[str](), list[str](), ""
    for cell in list_cells(grown):
        known = before.get(cell.name)
        if known is None:
            deeper.append(previous)  # a section's first cell always exists
            continue
        previous = cell.name
        if any(grown.axes[axis].size > parent.axes[axis].size for axis in known.axes if axis in grown.axes):
            wider.append(cell.name)
    return tuple(wider), tuple(dict.fromkeys(deeper))


def _repeat_sizes(config: Family, position: int) -> dict[str, tuple[int, ...]]:
    """The settings with a size for each block, with that of the preceding block once more at a position."""
    grown = {}
    for name in (*OF_SECTIONS_OR_BLOCKS, *OF_BLOCKS):
        values: tuple[int, ...] = getattr(config, name, ())
        if values and (name in OF_BLOCKS or len(values) != len(config.depths)):  # otherwise the size of its section
            each = expand_to_blocks(values, config.depths)
            grown[name] = (*each[:position], each[position - 1], *each[position:])
    return grown


def _inner_axes(network: Network, name: str) -> tuple[str, ...]:
    """The axes of a block that no other layer has, and whose indices can be copied."""
    inside, outside = set[str](), set[str]()
    for decl in network.tensors.values():
        (inside if decl.part == name else outside).update(network.list_axes(decl))
    return tuple(axis for axis in network.axes if axis in inside - outside and network.axes[axis].copied)


def _cell_axes(network: Network, name: str, section: int) -> tuple[str, ...]:
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
