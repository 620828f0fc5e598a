"""Weights that make new blocks the identity, so that a network computes the same with and without them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError

_EPSILON = 1e-5
"""What BatchNorm adds to the variance by default."""


def can_be_identity(network: Network, block: str) -> bool:
    """Whether a block can be the identity.

    A residual block can: with its last layer at 0 it adds nothing, for every activation, in training and in evaluation.
    A layer of a plain chain can if ReLUs are before and after it and it has no group norm: it passes its input on; with
    BatchNorm this only holds in evaluation, because training normalises by each batch.
    """
    own = [decl for decl in network.tensors.values() if decl.part == block]
    return any(decl.role == "residual" or decl.name in network.identities for decl in own)


def check_identity(network: Network, block: str) -> None:
    """Check that a block can be the identity.

    Raises:
        ConfigError: it cannot.
    """
    if not can_be_identity(network, block):
        raise ConfigError(
            f"block {block!r} has no weight that starts at 0 and no layer that passes its input on, so it cannot be "
            "the identity"
        )


def add_identities(
    network: Network,
    blocks: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Add weights to a network that make blocks that it lacks the identity.

    In residual blocks only the last layer is set, so that all others keep their first weights and learn at once; in
    plain layers all weights and norms are set.

    Args:
        network: the network.
        blocks: the blocks in network order.
        shapes: shapes of the tensors of the submodel with these blocks.
        weights: weights of the submodel without them.

    Raises:
        ConfigError: a block cannot be the identity.
    """
    completed = dict(weights)
    like = next(iter(weights.values()))
    for block in blocks:
        check_identity(network, block)
        for name, decl in network.tensors.items():
            if decl.part != block:
                continue
            if decl.role == "residual" or network.identities.get(name) == "silent":
                completed[name] = like.new_zeros(shapes[name])
            elif name in network.identities and decl.role == "gain":
                completed |= _make_passing_norm(network, name, completed)
            elif name in network.identities:
                completed[name] = _make_passing_kernel(like, shapes[name])
    return completed


def _make_passing_kernel(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The kernel of a layer that passes its channels on."""
    kernel = like.new_zeros(shape)
    height, width = (side // 2 for side in shape[2:])
    channels = torch.arange(shape[0])
    kernel[channels, channels if shape[1] > 1 else 0, height, width] = 1.0
    return kernel


def _make_passing_norm(network: Network, name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a norm that undoes its own normalisation.

    Its statistics are those of the previous norm's output after a ReLU, assuming a normal distribution, so that batches
    also pass almost unchanged in training, when their own statistics are used.
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
    tensors = {
        "weight": (variance + _EPSILON).sqrt(),
        "bias": mean,
        "running_mean": mean,
        "running_var": variance,
    }
    return {f"{prefix}{own}": tensor.to(weights[before].dtype) for own, tensor in tensors.items()}


def _norm_before(network: Network, name: str) -> tuple[str, str]:
    """Names of the gain and bias of the last norm in the previous block of the section."""
    block = network.tensors[name].part
    before = next(own[own.index(block) - 1] for own in network.sections if block in own)
    gains = [own for own, decl in network.tensors.items() if own.startswith(f"{before}.") and decl.role == "gain"]
    return gains[-1], f"{gains[-1].removesuffix('weight')}bias"
