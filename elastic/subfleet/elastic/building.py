"""How a network, its modules and its first weights come from one declaration."""

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor, nn

from subfleet.elastic.families.blueprint import declare, module_of, without_weights
from subfleet.elastic.network import Family, LocalShapes, Network, Role, TensorDecl
from subfleet.protocol.submodel import Architecture

__all__ = ["build_module", "init_state", "network_of", "sized_module"]

_MODULE_SEED = 0


@lru_cache(maxsize=32)  # an export asks several times, and each answer takes two modules
def network_of(config: Family) -> Network:
    """Declare the network of a family's settings.

    Raises:
        ConfigError: the family refuses them.
    """
    return declare(config, config.blueprint())


def init_state(network: Network, seed: int) -> dict[str, Tensor]:
    """The first weights of the full network, float32.

    Each tensor has a random stream of its own, derived from the seed and its name: adding a block to a network leaves
    the weights of all others as they were.
    """
    return {
        decl.name: torch.zeros(decl.shape) if decl.role == "residual" else _draw_tensor(decl, decl.shape, seed)
        for decl in network.tensors.values()
    }


def build_module(network: Network, architecture: Architecture) -> nn.Module:
    """A module of a submodel's own size, whose state has exactly the names and shapes of the submodel's maps.

    Its weights are drawn from a fixed seed, no layer's are zero, so that they show every wiring error; load the
    extracted state to use it. The global random state is untouched.

    Raises:
        ConfigError: the architecture is no submodel of this network.
    """
    local = network.local(architecture)
    module = sized_module(network.config, local)
    state = {name: _draw_tensor(network.tensors[name], shape, _MODULE_SEED) for name, shape in local.tensors.items()}
    module.load_state_dict(state, assign=True)
    return module


def sized_module(config: Family, local: LocalShapes) -> nn.Module:
    """A module of any sizes, without memory for its tensors.

    Args:
        config: of the network.
        local: sizes of its axes and shapes of its tensors; a block without tensors is left out.
    """
    with without_weights():
        return module_of(config.blueprint(), local)


_CONSTANT_ROLES: Mapping[Role, float] = MappingProxyType(
    {"gain": 1.0, "bias": 0.0, "step": 1.0, "mean": 0.0, "variance": 1.0}
)
_DEVIATIONS: Mapping[Role, float] = MappingProxyType({"embedding": 0.02, "symbol": 1.0})


def _draw_tensor(decl: TensorDecl, shape: tuple[int, ...], seed: int) -> Tensor:
    if decl.role in _CONSTANT_ROLES:
        return torch.full(shape, _CONSTANT_ROLES[decl.role])
    digest = hashlib.sha256(f"{seed}/{decl.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    deviation = _DEVIATIONS.get(decl.role) or math.sqrt(2 / math.prod(shape[1:]))
    return torch.randn(shape, generator=generator) * deviation
