"""Layer grafting: a shallow client's last block stands in for the blocks that it lacks; none is left to few clients.

Park and Joe-Wong, "Federated Learning with Flexible Architectures" (FedFA), section 4.2 and algorithm 2. Where a
submodel keeps the first block of a section alone, that is its last one, which is copied where it is like the others. In
most networks it is not, as it reads other channels: a submodel without any other block can then not be grafted, and is
refused. The paper's own architectures always have one.

The paper copies weights: with no training at all, a deep block still moves towards the last blocks of shallow clients,
round after round (`graft_change`). To copy what a block learned instead, each tensor the change of its source, leaves
an untrained model as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from subfleet.elastic.axes import factors_of
from subfleet.elastic.families.records.blocks import block_numbers
from subfleet.elastic.families.sections import block_name
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Graft:
    """A submodel with its copies.

    Attributes:
        architecture: of the submodel and its copies, whose inner axes are cut as those of the block that they copy.
        sources: the submodel's tensor that each of its tensors is, by name, in network order.
    """

    architecture: Architecture
    sources: Mapping[str, str]


def check_grafting(network: Network) -> None:
    """Make sure that blocks can stand for each other.

    Raises:
        ConfigError: layers have widths of their own, so that one reads and gives other channels than the next.
    """
    own = next((block for block in network.blocks if block.gives), None)
    if own is not None:
        raise ConfigError(
            f"block {own.name!r} reads and gives channels of its own, so that no other can be grafted as it; leave "
            "layer_widths empty, or set grafting = false or depth = false"
        )


def is_graftable(network: Network, architecture: Architecture) -> bool:
    """Whether a submodel has a block to be copied in each section that it lacks blocks of."""
    try:
        graft(network, architecture)
    except ConfigError:
        return False
    return True


def graft(network: Network, architecture: Architecture) -> Graft:
    """Append copies of the last block of each section, up to the network's depth.

    Raises:
        ConfigError: the architecture is not a submodel of this network, or the blocks of a section are not alike.
    """
    stands_for = {block: block for block in architecture.blocks}
    for section, numbers in enumerate(block_numbers(network.config)):
        blocks = [block.name for block in network.blocks if block.section == section]
        kept = [name for name in blocks if name in architecture.blocks] or [block_name(section, numbers[0])]
        stands_for |= {name: kept[-1] for name in blocks if name not in kept}
    sources = {name: name for name in network.shapes(architecture)}
    index_sets = dict(architecture.axes)
    for block, origin in stands_for.items():
        if block != origin:
            check_grafting(network)
            pairs = _counterparts(network, block, origin)
            sources |= pairs
            index_sets |= {
                axis: architecture.make_index_set(of)
                for name in pairs
                for axis, of in _renamed_axes(network, name, pairs[name])
            }
    blocks = [block.name for block in network.blocks if block.name in stands_for]
    grafted = replace(architecture, axes=tuple(sorted(index_sets.items())), blocks=tuple(blocks))
    shapes = network.shapes(grafted)
    odd = [name for name, source in sources.items() if shapes[name] != shapes[source]]
    if odd:
        raise ConfigError(
            f"submodel {architecture.name!r} cannot be grafted: its {sources[odd[0]]!r} is {shapes[sources[odd[0]]]}, "
            f"but as {odd[0]!r} would have to be {shapes[odd[0]]}; give it a second block in each section"
        )
    return Graft(architecture=grafted, sources={name: sources[name] for name in network.tensors if name in sources})


def graft_change(
    network: Network, found: Graft, state: Mapping[str, Tensor], change: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The change that puts the weights of a trained block at the places of its copies, as the paper does.

    Args:
        network: the network.
        found: the submodel with its copies.
        state: the full model that the round started from.
        change: trained minus received, by name of the submodel's tensors before grafting.

    Returns:
        A change of `found.architecture`; that of the submodel's own tensors is the given one.
    """
    received = extract(network, found.architecture, state)
    return {
        name: change[source] if name == source else received[source] + change[source] - received[name]
        for name, source in found.sources.items()
    }


def _counterparts(network: Network, block: str, origin: str) -> dict[str, str]:
    """The tensor of `origin` that each tensor of `block` corresponds to."""
    shapes = {
        owner: {
            name.removeprefix(f"{owner}."): decl.shape
            for name, decl in network.tensors.items()
            if name.startswith(f"{owner}.")
        }
        for owner in (block, origin)
    }
    if shapes[block] != shapes[origin]:
        raise ConfigError(
            f"block {origin!r} cannot be grafted as {block!r}, as their tensors differ; give the blocks of a section "
            "the same layers and widths, and each submodel one of them besides the section's first"
        )
    return {f"{block}.{suffix}": f"{origin}.{suffix}" for suffix in shapes[block]}


def _renamed_axes(network: Network, name: str, source: str) -> list[tuple[str, str]]:
    """Pairs of axes inside a copied block and inside its source; what blocks read and give is not theirs alone."""
    one, other = network.tensors[name], network.tensors[source]
    dims = zip(one.axes, other.axes, one.shape, strict=True)
    pairs = [pair for dim, of, size in dims for pair in zip(factors_of(dim, size), factors_of(of, size), strict=True)]
    inside = name.rpartition(".block")[0] + ".block"
    return [
        (axis, of)
        for axis, of in pairs
        if isinstance(axis, str) and isinstance(of, str) and axis != of and axis.startswith(inside)
    ]
