"""The families of networks, and how a network, its modules and its first weights come from one declaration."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from subfleet.elastic.families.blueprint import Blueprint, declare, module_of
from subfleet.elastic.families.inverted import efficientnet_v2, mobilenet_v2, mobilenet_v3
from subfleet.elastic.families.plain import ds_cnn, vgg
from subfleet.elastic.families.preact import mlp, preact_resnet
from subfleet.elastic.families.recurrent import build_lstm, declare_lstm
from subfleet.elastic.families.transformer import (
    build_bert,
    build_bert_classifier,
    build_decoder,
    build_vit,
    declare_classifier,
    declare_language_model,
    declare_vit,
)
from subfleet.elastic.network import LocalShapes, ModelConfig, Network, Role, TensorDecl
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["FAMILIES", "Family", "build_module", "init_state", "network_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A way to make networks.

    Attributes:
        declare: a configuration to its network.
        build: a configuration and the sizes of a subnet to a module whose state has exactly its tensors.
    """

    declare: Callable[[ModelConfig], Network]
    build: Callable[[ModelConfig, LocalShapes], nn.Module]


def _family_of(draw: Callable[[ModelConfig], Blueprint]) -> Family:
    return Family(
        declare=lambda config: declare(config, draw(config)),
        build=lambda config, local: module_of(draw(config), local),
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ds_cnn": _family_of(ds_cnn),
        "efficientnet_v2": _family_of(efficientnet_v2),
        "mlp": _family_of(mlp),
        "mobilenet_v2": _family_of(mobilenet_v2),
        "mobilenet_v3": _family_of(mobilenet_v3),
        "preact_resnet": _family_of(preact_resnet),
        "vgg": _family_of(vgg),
        "vit": Family(declare=declare_vit, build=build_vit),
        "bert": Family(declare=declare_language_model, build=build_bert),
        "bert_classifier": Family(declare=declare_classifier, build=build_bert_classifier),
        "decoder": Family(declare=declare_language_model, build=build_decoder),
        "lstm": Family(declare=declare_lstm, build=build_lstm),
    }
)


_MODULE_SEED = 0


def network_of(config: ModelConfig) -> Network:
    """Declare the network of a configuration.

    Raises:
        ConfigError: the family is unknown, or refuses the configuration.
    """
    return _family(config).declare(config)


def init_state(network: Network, seed: int) -> dict[str, Tensor]:
    """The first weights of the full network, float32.

    Each tensor has a random stream of its own, derived from the seed and its name: adding a block to a network leaves
    the weights of all others as they were.
    """
    return {
        decl.name: torch.zeros(decl.shape) if decl.role == "residual" else _draw_tensor(decl, decl.shape, seed)
        for decl in network.tensors.values()
    }


def build_module(network: Network, spec: SubnetSpec) -> nn.Module:
    """A module of a subnet's own size, whose state has exactly the names and shapes of the subnet's maps.

    Its weights are drawn from a fixed seed, no layer's are zero, so that they show every wiring error; load the
    extracted state to use it. The global random state is untouched.

    Raises:
        ConfigError: the spec is no subnet of this network.
    """
    local = network.local(spec)
    with torch.device("meta"):
        module = _family(network.config).build(network.config, local)
    state = {name: _draw_tensor(network.tensors[name], shape, _MODULE_SEED) for name, shape in local.tensors.items()}
    module.load_state_dict(state, assign=True)
    return module


def _family(config: ModelConfig) -> Family:
    if config.family not in FAMILIES:
        raise ConfigError(f"the model family is {config.family!r}, but must be one of {sorted(FAMILIES)}")
    return FAMILIES[config.family]


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
