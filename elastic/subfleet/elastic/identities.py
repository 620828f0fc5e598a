"""Blocks that compute nothing yet: what their tensors are so that a network with them does what it did without them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from subfleet.elastic.families.layers import EPSILON
from subfleet.elastic.families.records.blocks import block_numbers
from subfleet.elastic.families.sections import block_name
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError


def can_be_identity(network: Network, block: str) -> bool:
    """Whether a block can be the identity.

    Blocks that add to what they read can: what closes them is silent, which holds for every activation, in training
    and in evaluation. A layer of a plain chain can where ReLUs are before and behind it and no norm over groups is in
    it: it passes on what it reads, with BatchNorm in evaluation only, as training measures each batch.
    """
    own = [decl for decl in network.tensors.values() if decl.part == block]
    return any(decl.role == "residual" or decl.name in network.identities for decl in own)


def check_identity(network: Network, block: str) -> None:
    """Make sure that a block can be the identity.

    Raises:
        ConfigError: it cannot.
    """
    if not can_be_identity(network, block):
        raise ConfigError(
            f"block {block!r} has no weight that starts at 0 and no layer that passes on what it reads, so it cannot "
            "be the identity"
        )


def add_identities(
    network: Network,
    blocks: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """A network's weights, with what makes the identity of blocks that it lacks.

    Of blocks that add to what they read that is what closes them, so that all else keeps its first weights and learns
    at once; of layers that pass on, all of them and their norms.

    Args:
        network: the declaration.
        blocks: which, in network order.
        shapes: of the tensors of a submodel that has these blocks beside those that the weights are of.
        weights: of that submodel without them.

    Raises:
        ConfigError: a block cannot be the identity.
    """
    found = dict(weights)
    like = next(iter(weights.values()))
    for block in blocks:
        check_identity(network, block)
        for name, decl in network.tensors.items():
            if decl.part != block:
                continue
            if decl.role == "residual" or network.identities.get(name) == "silent":
                found[name] = like.new_zeros(shapes[name])
            elif name in network.identities and decl.role == "gain":
                found |= _make_passing_norm(network, name, found)
            elif name in network.identities:
                found[name] = _make_passing_kernel(like, shapes[name])
    return found


def _make_passing_kernel(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A layer that gives as many channels as it reads, and passes them on."""
    kernel = like.new_zeros(shape)
    height, width = (side // 2 for side in shape[2:])
    channels = torch.arange(shape[0])
    kernel[channels, channels if shape[1] > 1 else 0, height, width] = 1.0
    return kernel


def _make_passing_norm(network: Network, name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A norm with statistics of its own that puts back what they take away.

    They are those that a ReLU makes of what the norm before gives, as if that were normal, so that batches whose own
    statistics are taken in training come through nearly as they were.
    """
    prefix = name.removesuffix("weight")
    before, bias_before = _norm_before(network, name)
    gain, bias = weights[before].double(), weights[bias_before].double()
    deviation = gain.abs().clamp_min(1e-12)
    share = 0.5 * (1 + torch.erf(bias / deviation / math.sqrt(2)))
    density = torch.exp(-0.5 * (bias / deviation).square()) / math.sqrt(2 * math.pi)
    mean = bias * share + deviation * density
    square = (bias.square() + deviation.square()) * share + bias * deviation * density
    variance = (square - mean.square()).clamp_min(0.0)
    found = {
        "weight": (variance + EPSILON).sqrt(),
        "bias": mean,
        "running_mean": mean,
        "running_var": variance,
    }
    return {f"{prefix}{own}": tensor.to(weights[before].dtype) for own, tensor in found.items()}


def _norm_before(network: Network, name: str) -> tuple[str, str]:
    """Gain and bias of the last norm of the block before that of a tensor, in its section."""
    sections = block_numbers(network.config)
    names = [[block_name(section, number) for number in numbers] for section, numbers in enumerate(sections)]
    block = network.tensors[name].part
    before = next(own[own.index(block) - 1] for own in names if block in own)
    gains = [one for one, decl in network.tensors.items() if one.startswith(f"{before}.") and decl.role == "gain"]
    return gains[-1], f"{gains[-1].removesuffix('weight')}bias"
