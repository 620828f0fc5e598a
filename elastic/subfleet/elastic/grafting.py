"""Layer grafting: the last block of a shallow client replaces the blocks that it lacks, so that all clients train all.

Park and Joe-Wong, "Federated Learning with Flexible Architectures" (FedFA), section 4.2 and algorithm 2. If a submodel
only keeps the first block of a section, that block is copied if it has the same shapes as the others. In most networks
it does not, because it has other input channels: such a submodel cannot be grafted and is refused. The paper's own
architectures always have another block.

The paper copies weights: even without training, a deep block moves towards the last blocks of shallow clients in every
round (`graft_change`). Copying the change of the source block instead leaves an untrained model unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Graft:
    """A submodel with grafted blocks.

    Attributes:
        architecture: architecture of the submodel with copies; their inner axes are cut like the copied block's.
        sources: for each of its tensors, in network order, the submodel's tensor that it copies, by name.
    """

    architecture: Architecture
    sources: Mapping[str, str]


def check_grafting(network: Network) -> None:
    """Check that blocks can replace each other.

    Raises:
        ConfigError: layers have widths of their own, so that their input and output channels differ.
    """
    own = next((block for block in network.blocks if block.gives), None)
    if own is not None:
        raise ConfigError(
            f"block {own.name!r} has its own numbers of input and output channels, so no other block can replace it; "
            "leave layer_widths empty, or set grafting = false or depth = false"
        )


def is_graftable(network: Network, architecture: Architecture) -> bool:
    """Whether a submodel has a block to copy in each section with missing blocks."""
    try:
        graft(network, architecture)
    except ConfigError:
        return False
    return True


def graft(network: Network, architecture: Architecture) -> Graft:
    """Append copies of the last block of each section, up to the network's depth.

    Raises:
        ConfigError: the architecture is not a submodel of this network, or the blocks of a section differ in shape.
    """
    stands_for = {block: block for block in architecture.blocks}
    for section, names in enumerate(network.sections):
        blocks = [block.name for block in network.blocks if block.section == section]
        kept = [name for name in names if name not in blocks]
        trained = [name for name in blocks if name in architecture.blocks] or kept[-1:]
        if not trained:
            raise ConfigError(f"submodel {architecture.name!r} has no block of section {section} to copy; keep one")
        stands_for |= {name: trained[-1] for name in blocks if name not in trained}
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
            f"submodel {architecture.name!r} cannot be grafted: its {sources[odd[0]]!r} has the shape "
            f"{shapes[sources[odd[0]]]}, but {odd[0]!r} needs {shapes[odd[0]]}; give it a second block in each section"
        )
    return Graft(architecture=grafted, sources={name: sources[name] for name in network.tensors if name in sources})


def graft_change(
    network: Network, grafted: Graft, state: Mapping[str, Tensor], change: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Compute the change that sets copies to the weights of the trained block, as in the paper.

    Args:
        network: the network.
        grafted: the submodel with grafted blocks.
        state: the full model at the start of the round.
        change: trained minus received, by name of the submodel's tensors before grafting.

    Returns:
        A change of `grafted.architecture`; for the submodel's own tensors it equals the given one.
    """
    received = extract(network, grafted.architecture, state)
    return {
        name: change[source] if name == source else received[source] + change[source] - received[name]
        for name, source in grafted.sources.items()
    }


def _counterparts(network: Network, block: str, origin: str) -> dict[str, str]:
    """Map each tensor of `block` to the corresponding tensor of `origin`."""
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
            f"block {origin!r} cannot replace {block!r}, because their tensors differ; give the blocks of a section "
            "the same layers and widths, and each submodel one of them besides the section's first"
        )
    return {f"{block}.{suffix}": f"{origin}.{suffix}" for suffix in shapes[block]}


def _renamed_axes(network: Network, name: str, source: str) -> list[tuple[str, str]]:
    """Pairs of axes inside a copied block and its source, without the axes of their inputs and outputs."""
    copy, original = network.tensors[name], network.tensors[source]
    pairs = zip(chain.from_iterable(copy.factors), chain.from_iterable(original.factors), strict=True)
    inside = name.rpartition(".block")[0] + ".block"
    return [
        (axis, of)
        for axis, of in pairs
        if isinstance(axis, str) and isinstance(of, str) and axis != of and axis.startswith(inside)
    ]
