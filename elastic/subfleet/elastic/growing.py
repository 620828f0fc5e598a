"""Networks that grow block by block: wider cells, deeper cells, and other sizes of axes.

FedTrans (Zhu et al. 2024, section 4.1) transforms a model cell by cell. Here every block is a cell, even if all
submodels keep it. A cell becomes wider along its inner axes, so that no other shape changes. Layers of a plain chain
have none, so their outputs become wider, and with them all layers that share this axis.

A network that has grown is a recorded network, whatever family it started from; the tensors, axes and blocks that it
had before keep their names.
"""

import math
from collections.abc import Collection, Mapping
from fractions import Fraction

from subfleet.elastic.axes import Axis
from subfleet.elastic.building import network_of, record_of
from subfleet.elastic.families import AnyFamily
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.identities import can_be_identity
from subfleet.elastic.network import Family, Network
from subfleet.elastic.parts import Cell
from subfleet.elastic.recording.growing import copy_block, find_template, resize_record
from subfleet.elastic.recording.record import NetworkRecord, pack_record
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture


def describe_recorded(config: Family, record: NetworkRecord) -> Recorded:
    """The settings of a recorded network with the inputs of another one."""
    return Recorded(input_shape=config.input_shape, class_count=record.class_count, recording=pack_record(record))


def resize(network: Network, sizes: Mapping[str, int]) -> Family:
    """The settings of a network with other axis sizes; the same settings if all sizes are the same.

    Args:
        network: the network.
        sizes: sizes of axes by name; others stay.

    Raises:
        ConfigError: a tensor with fixed values would change.
    """
    if all(sizes.get(name, axis.size) == axis.size for name, axis in network.axes.items()):
        return network.config
    return describe_recorded(network.config, resize_record(record_of(network.config), sizes))


def derive_settings(network: Network, size: Architecture) -> AnyFamily:
    """Derive the settings of the network that equals a submodel with all blocks.

    Raises:
        ConfigError: the submodel lacks a block, or is no network by itself.
    """
    config: AnyFamily = resize(network, {name: network.sizes(size)[name] for name in network.axes})
    own = {name: decl.shape for name, decl in network_of(config).tensors.items()}
    if own != network.shapes(size):
        raise ConfigError(
            f"submodel {size.name!r} of family {network.config.TYPE!r} is not a network by itself; choose another one"
        )
    return config


def count_cell_parameters(network: Network) -> dict[str, int]:
    """The parameters of each cell by its name, running statistics included."""
    shapes = network.shapes(network.full_architecture())
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return {
        cell.name: sum(size for name, size in sizes.items() if name.startswith(f"{cell.name}."))
        for cell in network.cells
    }


def widen_cells(config: Family, cells: Collection[str], factor: float) -> Family:
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
    known = {cell.name: cell for cell in network.cells}
    for name in cells:
        if name not in known:
            raise ConfigError(f"cell {name!r} is to be widened, but the network has the cells {sorted(known)}")
        if not known[name].axes:
            raise ConfigError(f"cell {name!r} has no width of its own; deepen it instead")
    longer = {axis for name in cells for axis in known[name].axes}
    return resize(network, {name: _lengthen(network.axes[name], factor) for name in longer})


def deepen_cell(config: Family, cell: Cell, count: int = 1) -> Family:
    """The settings of a network with cells inserted after a cell, which are like it.

    A cell that changes the shape of its input is followed by cells like the next ones of its section. With its own
    first weights, the deeper network computes the same as before if blocks start as the identity; for other blocks
    `subfleet.elastic.identities` has such weights.

    Raises:
        ConfigError: the network has no such cell, or no cell that can follow it.
    """
    record, last = record_of(config), cell.name
    if all(block.name != last for block in record.blocks):
        raise ConfigError(f"cell {last!r} is to be deepened, but the network has {[own.name for own in record.blocks]}")
    for _ in range(count):
        record, last = copy_block(record, last)
    return describe_recorded(config, record)


def can_deepen(network: Network, cell: Cell) -> bool:
    """Whether a cell inserted after this one can start as the identity."""
    template = find_template(record_of(network.config), cell.name)
    if template is None or not template.kept:
        return template is not None and can_be_identity(network, template.name)
    deeper = network_of(deepen_cell(network.config, cell))
    (new,) = {block.name for block in deeper.blocks} - {block.name for block in network.blocks}
    return can_be_identity(deeper, new)


def find_changed_cells(parent: Network, grown: Network) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The cells that are wider in a network that grew from a parent, and the cells that new ones follow in it."""
    if parent.config == grown.config:
        return (), ()
    before = {cell.name: cell for cell in parent.cells}
    wider, deeper, previous = list[str](), list[str](), ""
    for cell in grown.cells:
        known = before.get(cell.name)
        if known is None:
            deeper.append(previous)  # a section's first cell always exists
            continue
        previous = cell.name
        if any(grown.axes[axis].size > parent.axes[axis].size for axis in known.axes if axis in grown.axes):
            wider.append(cell.name)
    return tuple(wider), tuple(dict.fromkeys(deeper))


def _lengthen(axis: Axis, factor: float) -> int:
    exact = Fraction(str(factor)) * (axis.size // axis.granularity)
    return math.ceil(exact) * axis.granularity
