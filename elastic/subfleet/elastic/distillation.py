"""In-place distillation: the full model teaches its own submodels on noise, without any data.

Yao et al., "Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection", section 3.3, algorithm 1;
the paper's text and its algorithm differ, so there are two modes, and a third of ours. Images are drawn from N(0, 1),
because clients normalise their inputs. For token models symbols are drawn uniformly, so that their embeddings are the
noise. All draws are made on the CPU, so they are the same on every device.

Norms with running statistics use those of the noise batch on discarded copies, so the statistics of real data stay.
Everything else, such as dropout, works as in evaluation, so a student of the full size agrees exactly with its teacher.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.batch_norms import NormalisingByBatch
from subfleet.elastic.building import build_module
from subfleet.elastic.maps import TensorMap, extract, tensor_maps
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.elastic.spaces import SearchSpace
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

Tensors = Mapping[str, Tensor]
_ROUNDING = 1e-5
"""Relative difference of probabilities, and so of logits, that rounding explains: a few digits of float32."""


def draw_students(
    network: Network, space: Sequence[Architecture] | SearchSpace, count: int, seed: int
) -> tuple[Architecture, ...]:
    """Draw the submodels that are taught: the one with the fewest parameters first, the others at random.

    Args:
        network: the network.
        space: the submodels to choose from, as a list or as a space of genes, each drawn uniformly.
        count: number of students, at least 1; the paper takes the number of clients of the round.
        seed: seed of the draw.

    Raises:
        ConfigError: the space or the count is empty, or an architecture is not a submodel of this network.
    """
    available = space.count() if isinstance(space, SearchSpace) else len(space)
    if not available or count < 1:
        raise ConfigError(f"{count} students are to be drawn from {available} submodels, but both must be 1 or more")
    stream = random.Random(f"subfleet students 1/{seed}")  # noqa: S311 - chooses submodels, keeps no secret
    if isinstance(space, SearchSpace):
        return tuple(map(space.architecture, (space.smallest, *(space.random(stream) for _ in range(count - 1)))))
    return (min(space, key=network.parameter_count), *stream.choices(space, k=count - 1))


def distil(
    network: Network, state: Tensors, architectures: Sequence[Architecture], settings: DistillationSettings, seed: int
) -> dict[str, Tensor]:
    """Teach submodels the full model's outputs on noise.

    With learning rate 0, or if every student is the full model, no bit changes. Elements that no student holds and
    running statistics never change.

    Args:
        network: the network.
        state: the full model's tensors by name.
        architectures: the students; each of their divergences counts equally. A student that is listed twice counts
            twice, at the cost of one.
        settings: mode, iterations, batch size, learning rate and temperature.
        seed: seed of the noise.

    Returns:
        The new full model; it shares no memory with the old one where it differs.

    Raises:
        ConfigError: there is no student, or an architecture is not a submodel of this network.
    """
    if not architectures:
        raise ConfigError("distillation needs at least one student, but got none; draw some, or turn distillation off")
    return _MODES[settings.mode](network, state, architectures, settings, seed)


def divergence_gradient(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """The gradient of the divergence from the teacher's logits with respect to the student's, averaged over the rows.

    The divergence is T^2 KL(softmax(teacher / T) || softmax(student / T)). This closed form is exactly 0 if both agree
    up to rounding, as for a student of the full size: one network computed twice may differ in the last digits.
    Differentiating the logarithms would leave errors of 1e-9, which Adam, dividing by the size of the gradient, would
    turn into steps of the full learning rate.

    Args:
        student: logits (rows, classes).
        teacher: logits (rows, classes).
        temperature: T.
    """
    taught = torch.softmax(teacher / temperature, dim=-1)
    difference = torch.softmax(student / temperature, dim=-1) - taught
    agreed = difference.abs() <= _ROUNDING * taught
    return difference.masked_fill(agreed, 0) * (temperature / len(student))


def _distil_shared(
    network: Network, state: Tensors, architectures: Sequence[Architecture], settings: DistillationSettings, seed: int
) -> dict[str, Tensor]:
    teacher = _module(network, network.full_architecture(), state)
    shares = [(architecture, count / len(architectures)) for architecture, count in Counter(architectures).items()]
    students = [
        (_module(network, architecture, state), tensor_maps(network, architecture), share)
        for architecture, share in shares
    ]
    weights = {name: state[name].clone().requires_grad_() for name in _iterate_trainable(network, state)}
    optimiser = torch.optim.Adam(list(weights.values()), lr=settings.learning_rate)
    current = {**state, **weights}
    teaching = state if settings.mode == "anchored" else current
    for inputs in _noise(network, settings, seed, _device_of(state)):
        with torch.no_grad():
            expected = _rows(teacher, teaching, inputs)
        optimiser.zero_grad()
        # Students in turn: the gradient of the sum with the memory of one graph.
        for student, maps, share in students:
            logits = _rows(student, _slices(maps, current), inputs)
            gradient = share * divergence_gradient(logits.detach(), expected, settings.temperature)
            torch.autograd.backward(logits, gradient)
        optimiser.step()
    # Adding 0 to -0.0 may give 0.0.
    moved = {name: torch.where(tensor == state[name], state[name], tensor.detach()) for name, tensor in weights.items()}
    return {**state, **moved}


def _distil_copies(
    network: Network, state: Tensors, architectures: Sequence[Architecture], settings: DistillationSettings, seed: int
) -> dict[str, Tensor]:
    device = _device_of(state)
    teacher = _module(network, network.full_architecture(), state)
    with torch.no_grad():
        expected = [_rows(teacher, state, inputs) for inputs in _noise(network, settings, seed, device)]
    accumulator = Accumulator(network, state, total_weight=len(architectures) + 1)
    accumulator.add(network.full_architecture(), {name: torch.zeros_like(tensor) for name, tensor in state.items()}, 1)
    # Students in turn, on the same noise: the memory of one copy.
    for architecture, count in Counter(architectures).items():
        module, received = _module(network, architecture, state), extract(network, architecture, state)
        weights = {name: received[name].clone().requires_grad_() for name in _iterate_trainable(network, received)}
        optimiser = torch.optim.Adam(list(weights.values()), lr=settings.learning_rate)
        for inputs, target in zip(_noise(network, settings, seed, device), expected, strict=True):
            logits = _rows(module, {**received, **weights}, inputs)
            optimiser.zero_grad()
            torch.autograd.backward(logits, divergence_gradient(logits.detach(), target, settings.temperature))
            optimiser.step()
        trained = {**received, **weights}
        accumulator.add(
            architecture, {name: trained[name].detach() - tensor for name, tensor in received.items()}, count
        )
    return accumulator.finish()


_Mode = Callable[[Network, Tensors, Sequence[Architecture], DistillationSettings, int], dict[str, Tensor]]
_MODES: Mapping[str, _Mode] = MappingProxyType(
    {"shared": _distil_shared, "anchored": _distil_shared, "copies": _distil_copies}
)


def _device_of(state: Tensors) -> torch.device:
    return next(iter(state.values())).device


def _iterate_trainable(network: Network, tensors: Tensors) -> Iterator[str]:
    decls = network.tensors
    return (name for name in tensors if decls[name].role not in BUFFER_ROLES and not decls[name].frozen)


def _slices(maps: Mapping[str, TensorMap], state: Tensors) -> dict[str, Tensor]:
    """The tensors of a submodel, through which the gradient flows to the full model's."""
    return {name: tensor_map.extract(state[name]) for name, tensor_map in maps.items()}


def _module(network: Network, architecture: Architecture, state: Tensors) -> nn.Module:
    return build_module(network, architecture).to(_device_of(state)).eval()


def _rows(module: nn.Module, tensors: Tensors, inputs: Tensor) -> Tensor:
    """The logits of a module with these tensors, a row for each prediction: (rows, classes)."""
    buffers = {name: tensors[name].clone() for name, _ in module.named_buffers() if name in tensors}
    with NormalisingByBatch(buffers):
        logits: Tensor = functional_call(module, {**tensors, **buffers}, (inputs,))
    return logits.flatten(0, -2)


def _noise(network: Network, settings: DistillationSettings, seed: int, device: torch.device) -> Iterator[Tensor]:
    """The inputs of all iterations, determined by the seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (settings.batch_size, *network.config.input_shape)
    for _ in range(settings.iterations):
        if network.symbols:
            yield torch.randint(network.symbols, shape, generator=generator).to(device)
        else:
            yield torch.randn(shape, generator=generator).to(device)
