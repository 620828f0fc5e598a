"""Build networks, their modules and their first weights from settings."""

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor, nn

from subfleet.elastic.declaring import declare
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.network import Family, LocalShapes, Network, Role, TensorDecl
from subfleet.elastic.recording.markers import find_markers
from subfleet.elastic.recording.record import NetworkRecord
from subfleet.elastic.recording.recorder import record_module
from subfleet.elastic.recording.replaying import ReplayedModule
from subfleet.elastic.subspaces import build_subspace, declare_supernet
from subfleet.elastic.supernets import Supernet
from subfleet.elastic.undrawn import Undrawn
from subfleet.protocol.submodel import Architecture

__all__ = ["build_module", "count_parameters", "init_state", "network_of"]

_MODULE_SEED = 0
_MOST_RUN, _MOST_HELD = 2 * 10**10, 2**24


@lru_cache(maxsize=256)  # an export calls it several times, and each call builds two modules
def network_of(config: Family) -> Network:
    """The network of a family's settings.

    Raises:
        ConfigError: the settings are invalid.
    """
    return declare_supernet(config) if isinstance(config, Supernet) else declare(config, record_of(config))


@lru_cache(maxsize=256)
def record_of(config: Family) -> NetworkRecord:
    """The record of a family's settings: their own, or that of their module.

    Raises:
        ConfigError: the settings are invalid.
    """
    if isinstance(config, Recorded):
        return config.record()
    with torch.device("meta"), Undrawn():
        module = config.module()
    if not find_markers(module).drawn or not _is_large(config, module):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # noqa: TID251 - the family's code draws; the same settings must give the same record
            module = config.module()
    return record_module(module, config.input_shape, symbols=getattr(config, "vocabulary", 0))


def _is_large(config: Family, module: nn.Module) -> bool:
    """Whether a run of a network may take longer than loading what PyTorch needs to run it without memory."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return parameters * math.prod(config.input_shape[1:]) > _MOST_RUN or parameters > _MOST_HELD


def count_parameters(config: Family) -> int:
    """The number of a network's parameters and running statistics, which takes no memory for them.

    Raises:
        ConfigError: the settings are invalid.
    """
    with torch.device("meta"), Undrawn():
        return sum(tensor.numel() for tensor in config.module().state_dict().values())


def init_state(network: Network, seed: int) -> dict[str, Tensor]:
    """The first weights of the full network, float32.

    Each tensor has its own random stream from the seed and its name, so adding a block does not change the weights of
    the others.
    """
    return {
        decl.name: torch.zeros(decl.shape) if decl.role == "residual" else _draw_tensor(decl, decl.shape, seed)
        for decl in network.tensors.values()
    }


def build_module(network: Network, architecture: Architecture) -> nn.Module:
    """Build a module of a submodel's size, with exactly the tensor names and shapes of the submodel's maps.

    Its weights are drawn from a fixed seed and no layer starts at zero, so that wiring errors show; load the extracted
    state to use it. The global random state is not used.

    Raises:
        ConfigError: the architecture is not a submodel of this network.
    """
    local = network.local(architecture)
    module = sized_module(network.config, local)
    state = {name: _draw_tensor(network.tensors[name], shape, _MODULE_SEED) for name, shape in local.tensors.items()}
    module.load_state_dict(state, assign=True)
    return module


def sized_module(config: Family, local: LocalShapes) -> nn.Module:
    """Build a module of any sizes without memory for its tensors.

    Args:
        config: settings of the network.
        local: sizes of the axes and shapes of the tensors; a block without tensors is omitted.
    """
    record = None if isinstance(config, Supernet) else record_of(config)
    with torch.device("meta"), Undrawn():
        if record is None:
            return build_subspace(config, local.parts)
        return ReplayedModule(record, local.sizes, local.parts)


_CONSTANT_ROLES: Mapping[Role, float] = MappingProxyType(
    {"gain": 1.0, "bias": 0.0, "step": 1.0, "mean": 0.0, "variance": 1.0}
)
_DEVIATIONS: Mapping[Role, float] = MappingProxyType({"embedding": 0.02, "symbol": 1.0})


def _draw_tensor(decl: TensorDecl, shape: tuple[int, ...], seed: int) -> Tensor:
    if isinstance(decl.start, bytes) and shape == decl.shape:
        return torch.frombuffer(bytearray(decl.start), dtype=torch.float32).reshape(shape)
    mean, deviation = decl.start if isinstance(decl.start, tuple) else _find_start(decl.role, shape)
    if not deviation:
        return torch.full(shape, mean)
    digest = hashlib.sha256(f"{seed}/{decl.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    drawn = torch.randn(shape, generator=generator) * deviation
    return drawn + mean if mean else drawn


def _find_start(role: Role, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of the first values of a tensor."""
    if role in _CONSTANT_ROLES:
        return _CONSTANT_ROLES[role], 0.0
    return 0.0, _DEVIATIONS.get(role) or math.sqrt(2 / math.prod(shape[1:]))
