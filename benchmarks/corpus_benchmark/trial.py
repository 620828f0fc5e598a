"""Tries one network of the corpus in a process of its own: records it, cuts it, and compares what is left."""

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from corpus_benchmark.networks import CorpusNetwork, count_parameters, draw_inputs, make_seeded
from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.maps import extract, overwrite, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.recording.record import unpack_record
from subfleet.export.steps.reference.pytorch import compute_in
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Explicit, Prefix

_SUBMODELS = 3
_SAMPLES = 2
_LEAST, _EIGHTH = 2, 8
"""Of one index there may be nothing to normalise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """How a network was recorded.

    Attributes:
        network: its name.
        refused: why it was refused; empty if it was recorded.
        seconds: time to record it.
        parameters: of the whole network.
        smallest: parameters of the smallest submodel over those of the whole; see `find_smallest`.
        whole_error: largest difference of the recorded whole from the module, relative to the largest logit.
        submodel_error: the same of random submodels from the whole with zeros in place of what they lack, in double
            precision.
        axes: number of axes.
        blocks: number of blocks that can be left out.
        mixed: number of axes whose indices an operator combines; the comparison of submodels keeps these.
    """

    network: str
    refused: str = ""
    seconds: float = 0.0
    parameters: int = 0
    smallest: float = 1.0
    whole_error: float = 0.0
    submodel_error: float = 0.0
    axes: int = 0
    blocks: int = 0
    mixed: int = 0


def record(described: CorpusNetwork) -> Recording:
    """Record a network, and compare the record with it."""
    module = _disable_dropout(make_seeded(described))
    started_s = time.monotonic()
    try:
        family = record_network(module, described.input_shape, symbols=described.symbols)
    except ConfigError as error:
        return Recording(network=described.name, refused=str(error), parameters=count_parameters(module))
    seconds = time.monotonic() - started_s
    network = network_of(family)
    _train_smallest(described, network)
    whole = network.full_architecture()
    state = {name: tensor.detach() for name, tensor in module.state_dict().items() if name in network.tensors}
    return Recording(
        network=described.name,
        seconds=round(seconds, 2),
        parameters=network.parameter_count(whole),
        smallest=network.parameter_count(find_smallest(network)) / network.parameter_count(whole),
        whole_error=_compare_whole(described, module, network, state),
        submodel_error=_compare_submodels(described, family, network, state),
        axes=len(network.axes),
        blocks=len(network.blocks),
        mixed=len(_list_mixed(family)),
    )


def find_smallest(network: Network) -> Architecture:
    """The submodel with an eighth of every axis, at least 2 indices of a larger one or a group, and no block."""
    axes = [axis for _, axis in sorted(network.axes.items()) if axis.kind != "class" and axis.size > _LEAST]
    sizes = [
        max(_LEAST, axis.size // _EIGHTH // axis.granularity * axis.granularity, axis.granularity) for axis in axes
    ]
    return Architecture(axes=tuple((axis.name, Prefix(size=own)) for axis, own in zip(axes, sizes, strict=True)))


def _train_smallest(described: CorpusNetwork, network: Network) -> None:
    """Compute the gradients of the smallest submodel."""
    module = build_module(network, find_smallest(network)).train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
    module(draw_inputs(described, _SAMPLES, 0)).square().sum().backward()


def _disable_dropout(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return module


def _list_mixed(family: Recorded) -> frozenset[str]:
    return frozenset(axis.name for axis in unpack_record(family.recording).axes if axis.mixed)


def _compare_whole(described: CorpusNetwork, module: nn.Module, network: Network, state: dict[str, Tensor]) -> float:
    replayed = build_module(network, network.full_architecture())
    replayed.load_state_dict(state)
    inputs = draw_inputs(described, _SAMPLES, 1)
    with torch.no_grad():
        expected = module.eval()(inputs)
        return _difference(replayed.eval()(inputs), expected.permute(0, 2, 3, 1) if expected.dim() == 4 else expected)


def _compare_submodels(described: CorpusNetwork, family: Recorded, network: Network, state: dict[str, Tensor]) -> float:
    """The largest difference of random submodels from the masked whole; axes that are mixed stay whole.

    In double precision: rounding alone is 8e-5 of the logits in single precision where norms amplify it.
    """
    draw, mixed, worst = random.Random(0), _list_mixed(family), 0.0  # noqa: S311 - draws submodels, keeps no secret
    drawn = _redraw(network, state)
    inputs = draw_inputs(described, _SAMPLES, 2)
    for _ in range(_SUBMODELS):
        architecture = _draw_architecture(network, draw, mixed)
        whole = Architecture(blocks=architecture.blocks)
        ours = _compute_doubled(network, architecture, extract(network, architecture, drawn), inputs)
        expected = _compute_doubled(network, whole, _mask(network, architecture, drawn), inputs)
        worst = max(worst, _difference(ours, expected))
    return worst


def _compute_doubled(network: Network, architecture: Architecture, state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """The logits of a submodel in double precision."""
    module = build_module(network, architecture)
    module.load_state_dict(state)
    state.clear()  # large networks need the memory
    with torch.no_grad(), compute_in(torch.float64):
        logits: Tensor = module.double().eval()(inputs.double() if inputs.is_floating_point() else inputs)
    return logits


def _redraw(network: Network, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The network's tensors with random statistics, biases and factors, so that no difference is lost in small ones."""
    generator, drawn = torch.Generator().manual_seed(3), {}
    for name, tensor in state.items():
        role, noise = network.tensors[name].role, torch.rand(tensor.shape, generator=generator)
        constant = tensor.dim() == 1 or bool((tensor == tensor.flatten()[0]).all())
        drawn[name] = noise + 0.5 if role == "variance" else tensor + 0.1 * noise if constant else tensor
    return drawn


def _draw_architecture(network: Network, draw: random.Random, keep: frozenset[str]) -> Architecture:
    axes = []
    for name, axis in sorted(network.axes.items()):
        if name not in keep and axis.kind != "class":
            groups, step = axis.size // axis.granularity, axis.granularity
            kept = sorted(draw.sample(range(groups), draw.randint(max(1, groups // 3), groups)))
            axes.append((name, Explicit(indices=tuple(group * step + own for group in kept for own in range(step)))))
    return Architecture(axes=tuple(axes), blocks=tuple(block.name for block in network.blocks if draw.random() < 0.7))


def _mask(network: Network, architecture: Architecture, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the network with these blocks, zero at removed indices; variances stay 1."""
    maps = tensor_maps(network, architecture)
    kept = extract(network, Architecture(blocks=architecture.blocks), state)
    rest = {name: torch.full_like(own, float(network.tensors[name].role == "variance")) for name, own in kept.items()}
    return {name: overwrite(maps[name], maps[name].extract(tensor), rest[name]) for name, tensor in kept.items()}


def _difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
