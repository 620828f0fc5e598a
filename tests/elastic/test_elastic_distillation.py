from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from elastic.elastic_cases import MLP, RESNET, random_state
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softmax

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.distillation import distil, divergence_gradient, draw_students
from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.elastic.maps import extract, tensor_maps
from subfleet.elastic.network import BUFFER_ROLES, Family, Network
from subfleet.elastic.spaces import uniform_space
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Explicit, IndexSet, Roll
from subfleet.testing.submodels import find_held_elements, have_same_bits

BATCH_RESNET = replace(RESNET, norm="batch")
RECURRENT = Lstm(
    input_shape=(5,),
    class_count=6,
    widths=(5, 4),
    depths=(2, 1),
    vocabulary=6,
    embedding_width=3,
    norm="none",
)
BATCH_SIZE = 4
MODES = ("shared", "anchored", "copies")
State = Mapping[str, Tensor]


def working_state(network: Network, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the usual size; no tensor is 0, and variances are above 0."""
    state = random_state(network, seed)
    for name, decl in network.tensors.items():
        if decl.role == "variance":
            state[name] = state[name].square() + 0.5
        elif decl.role != "gain":
            state[name] = state[name] * 0.3
    return state


def few_students(network: Network) -> tuple[Architecture, ...]:
    """A small nested submodel, and one with channels that are neither the first ones nor in order."""
    small = uniform_space(network, (0.5,))[0]
    channels = [axis for axis in network.axes.values() if axis.kind == "channel"]
    first, second = channels[0], channels[1]
    step = first.granularity
    shuffled = (*range(step, 2 * step), *range(step))
    axes: dict[str, IndexSet] = {
        first.name: Explicit(indices=shuffled),
        second.name: Roll(start=second.size - second.granularity, size=second.granularity),
    }
    return small, Architecture(axes=tuple(sorted(axes.items())), blocks=small.blocks)


def settings(mode: str, **changes: float) -> DistillationSettings:
    values = {"iterations": 2, "batch_size": BATCH_SIZE, "learning_rate": 1e-2, **changes}
    return DistillationSettings(mode=mode, **values)  # type: ignore[arg-type]


def noise(network: Network, iterations: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH_SIZE, *network.config.input_shape)
    return [torch.randn(shape, generator=generator) for _ in range(iterations)]


def logits_of(
    network: Network, architecture: Architecture, state: State, inputs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of a separate module with a copy of the weights, and the parameters of that module."""
    module = build_module(network, architecture)
    module.load_state_dict(extract(network, architecture, state))
    module.train()
    outputs: Tensor = module(inputs)
    return outputs, dict(module.named_parameters())


def gradients_of(
    network: Network, architecture: Architecture, state: State, teacher_logits: Tensor, inputs: Tensor
) -> State:
    logits, parameters = logits_of(network, architecture, state, inputs)
    loss = kl_div(log_softmax(logits, dim=-1), softmax(teacher_logits, dim=-1), reduction="batchmean")
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


def distil_shared(network: Network, state: State, architectures: Sequence[Architecture], mode: str) -> State:
    """Algorithm 1, with extracted copies, the divergence of PyTorch and scattered gradients."""
    weights = {name: tensor.clone() for name, tensor in state.items()}
    adam = torch.optim.Adam(list(weights.values()), lr=1e-2)
    for inputs in noise(network, 2, seed=5):
        teacher = weights if mode == "shared" else state
        teacher_logits = logits_of(network, network.full_architecture(), teacher, inputs)[0].detach()
        for tensor in weights.values():
            tensor.grad = torch.zeros_like(tensor)
        for architecture in architectures:
            maps = tensor_maps(network, architecture)
            for name, gradient in gradients_of(network, architecture, weights, teacher_logits, inputs).items():
                sums = weights[name].grad
                assert sums is not None
                maps[name].scatter(gradient / len(architectures), sums)
        adam.step()
    return weights


def distil_copies(network: Network, state: State, architectures: Sequence[Architecture], seed: int) -> State:
    """As in the text: train copies separately, then average each element over its holders and the full model."""
    sums = {name: tensor.double().clone() for name, tensor in state.items()}
    counts = {name: torch.ones_like(tensor) for name, tensor in sums.items()}
    for architecture in architectures:
        local, maps = extract(network, architecture, state), tensor_maps(network, architecture)
        adam = torch.optim.Adam(list(local.values()), lr=1e-2)
        full = Architecture(blocks=network.full_architecture().blocks)
        for inputs in noise(network, 2, seed):
            teacher_logits = logits_of(network, full, state, inputs)[0].detach()
            placed = {name: tensor.clone() for name, tensor in state.items()}
            for name, tensor in local.items():
                maps[name].scatter(tensor - maps[name].extract(placed[name]), placed[name])
            for name, gradient in gradients_of(network, architecture, placed, teacher_logits, inputs).items():
                local[name].grad = gradient
            adam.step()
        for name, tensor in local.items():
            maps[name].scatter(tensor.double(), sums[name])
            maps[name].scatter(torch.ones_like(tensor).double(), counts[name])
    return {name: (sums[name] / counts[name]).float() for name in sums}


def divergence(network: Network, architecture: Architecture, state: State, teacher: State, inputs: Tensor) -> float:
    student = logits_of(network, architecture, state, inputs)[0]
    teacher_logits = logits_of(network, network.full_architecture(), teacher, inputs)[0]
    return kl_div(log_softmax(student, dim=-1), softmax(teacher_logits, dim=-1), reduction="batchmean").item()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_gradient_is_that_of_the_divergence_of_the_probabilities(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn((5, 4), generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    loss = kl_div(
        log_softmax(student / temperature, dim=1), softmax(teacher / temperature, dim=1), reduction="batchmean"
    )
    (expected,) = torch.autograd.grad(loss * temperature**2, student)
    torch.testing.assert_close(divergence_gradient(student.detach(), teacher, temperature), expected)


def test_the_gradient_is_exactly_zero_where_both_agree_up_to_rounding() -> None:
    logits = torch.randn((7, 5), generator=torch.Generator().manual_seed(0)) * 10
    assert torch.count_nonzero(divergence_gradient(logits, logits.clone(), 0.7)) == 0
    assert torch.count_nonzero(divergence_gradient(logits, logits * (1 + 1e-7), 0.7)) == 0
    unsure = logits / 10
    assert torch.count_nonzero(divergence_gradient(unsure, unsure * (1 + 1e-3), 0.7)) == logits.numel()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "anchored"])
@pytest.mark.parametrize("config", [RESNET, MLP, BATCH_RESNET])
def test_shared_weights_take_the_steps_of_the_mean_divergence(mode: str, config: Family, device: torch.device) -> None:
    network = network_of(config)
    state, architectures = working_state(network), few_students(network)
    with torch.backends.cudnn.flags(enabled=False):
        # Convolutions in full precision on a GPU too.
        distilled = distil(network, _to_device(device, state), architectures, settings(mode), seed=5)
    expected = distil_shared(network, state, architectures, mode)
    assert fraction_moved_as_expected(network, state, distilled, expected) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("config", [RESNET, MLP])
def test_copies_are_trained_apart_and_averaged_with_the_full_model(config: Family, device: torch.device) -> None:
    network = network_of(config)
    state, architectures = working_state(network), few_students(network)
    with torch.backends.cudnn.flags(enabled=False):
        distilled = distil(network, _to_device(device, state), architectures, settings("copies"), seed=5)
    expected = distil_copies(network, state, architectures, seed=5)
    assert fraction_moved_as_expected(network, state, distilled, expected) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_student_that_is_there_twice_counts_twice(mode: str) -> None:
    network = network_of(RESNET)
    state, (first, second) = working_state(network), few_students(network)
    distilled = distil(network, state, (first, second, first), settings(mode), seed=5)
    if mode == "copies":
        expected = distil_copies(network, state, (first, second, first), seed=5)
    else:
        expected = distil_shared(network, state, (first, second, first), mode)
    assert fraction_moved_as_expected(network, state, distilled, expected) > 0.99
    once = distil(network, state, (first, second), settings(mode), seed=5)
    assert fraction_moved_as_expected(network, state, once, expected) < 0.99


def fraction_moved_as_expected(network: Network, state: State, distilled: State, expected: State) -> float:
    """Of the elements expected to move, the fraction that moved as expected, up to rounding.

    Not all do: where a gradient is almost zero, its rounding decides the sign of a whole Adam step.
    """
    equal, moved = 0, 0
    for name, decl in network.tensors.items():
        if decl.role not in BUFFER_ROLES:
            moves = (expected[name] - state[name]).abs() > 1e-4
            equal += int(((distilled[name].cpu() - expected[name]).abs() < 2e-5)[moves].sum())
            moved += int(moves.sum())
    assert moved > 100
    return equal / moved


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [RESNET, BATCH_RESNET])
def test_learning_rate_zero_moves_no_bit(mode: str, config: Family, device: torch.device) -> None:
    network = network_of(config)
    state = working_state(network)
    for tensor in state.values():
        tensor.reshape(-1)[0] = -0.0
    distilled = distil(
        network, _to_device(device, state), few_students(network), settings(mode, learning_rate=0.0), seed=1
    )
    assert have_same_bits(_to_device(torch.device("cpu"), distilled), state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [RESNET, MLP, BATCH_RESNET])
def test_students_that_are_the_full_model_move_no_bit(mode: str, config: Family, device: torch.device) -> None:
    network = network_of(config)
    state = working_state(network)
    full = network.full_architecture()
    distilled = distil(network, _to_device(device, state), [full, full], settings(mode), seed=1)
    assert have_same_bits(_to_device(torch.device("cpu"), distilled), state)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [RESNET, BATCH_RESNET])
def test_what_no_student_holds_and_what_norms_measured_stay_to_the_bit(
    mode: str, config: Family, device: torch.device
) -> None:
    network = network_of(config)
    state, architectures = working_state(network), few_students(network)
    distilled = _to_device(
        torch.device("cpu"), distil(network, _to_device(device, state), architectures, settings(mode), seed=1)
    )
    held = [find_held_elements(network, architecture) for architecture in architectures]
    untouched = 0
    for name, decl in network.tensors.items():
        untrained = ~torch.stack([mask[name] for mask in held]).any(dim=0)
        if decl.role in BUFFER_ROLES:
            untrained = torch.ones_like(untrained)
        assert have_same_bits({name: distilled[name][untrained]}, {name: state[name][untrained]}), name
        untouched += int(untrained.sum())
    assert untouched > 100


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_students_come_closer_to_their_teacher_on_noise_that_they_have_not_seen(mode: str) -> None:
    network = network_of(MLP)
    state = working_state(network)
    architectures = few_students(network)[:1]
    distilled = distil(network, state, architectures, settings(mode, iterations=40, batch_size=32), seed=3)
    unseen = torch.randn((200, *MLP.input_shape), generator=torch.Generator().manual_seed(99))
    before = divergence(network, architectures[0], state, state, unseen)
    # The teacher does not change, except in mode "shared", where it moves with its students.
    after = divergence(network, architectures[0], distilled, distilled if mode == "shared" else state, unseen)
    assert after < 0.8 * before


def test_noise_follows_from_the_seed() -> None:
    network = network_of(MLP)
    state, architectures = working_state(network), few_students(network)
    first, again, other = (distil(network, state, architectures, settings("shared"), seed) for seed in (1, 1, 2))
    assert have_same_bits(first, again)
    assert not have_same_bits(first, other)


@pytest.mark.slow
def test_the_received_model_is_not_written() -> None:
    network = network_of(BATCH_RESNET)
    state = working_state(network)
    before = {name: tensor.clone() for name, tensor in state.items()}
    for mode in MODES:
        distil(network, state, few_students(network), settings(mode), seed=1)
    assert have_same_bits(state, before)


@pytest.mark.parametrize("mode", MODES)
def test_token_models_learn_from_random_symbols(mode: str) -> None:
    network = network_of(RECURRENT)
    state = init_state(network, 0)
    # A submodel that cuts all gates, without the layer that may be skipped.
    axis = next(name for name, axis in network.axes.items() if axis.kind == "channel")
    architecture = Architecture(axes=((axis, Roll(start=1, size=3)),))
    distilled = distil(network, state, [architecture], settings(mode), seed=1)
    held = find_held_elements(network, architecture)
    for name, tensor in distilled.items():
        if bool(held[name].any()):
            assert not torch.equal(tensor, state[name]), name
    # The kernels of LSTMs round differently from call to call.
    full = distil(network, state, [network.full_architecture()], settings(mode, iterations=5), seed=1)
    assert have_same_bits(full, state)


def test_the_smallest_submodel_is_the_first_student() -> None:
    network = network_of(RESNET)
    space = uniform_space(network, (0.5, 1.0))
    students = draw_students(network, tuple(reversed(space)), 20, seed=4)
    assert students[0] == space[0]
    assert len(students) == 20
    assert len(set(students)) > 3
    assert students == draw_students(network, tuple(reversed(space)), 20, seed=4)
    assert students != draw_students(network, tuple(reversed(space)), 20, seed=5)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mode": "both"}, r"must be one of \['shared', 'anchored', 'copies'\]"),
        ({"iterations": -1}, "iterations is -1, but must be 0 or more"),
        ({"batch_size": 1}, "batch_size is 1, but must be 2 or more"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0, but must be 0 or more"),
        ({"learning_rate": float("nan")}, "must be a finite number"),
        ({"temperature": 0.0}, "temperature is 0.0, but must be above 0"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DistillationSettings(**values)  # type: ignore[arg-type]


def test_distillation_without_a_student_is_refused() -> None:
    network = network_of(MLP)
    with pytest.raises(ConfigError, match="at least one student"):
        distil(network, working_state(network), [], settings("shared"), seed=0)
    with pytest.raises(ConfigError, match="0 students are to be drawn"):
        draw_students(network, [network.full_architecture()], 0, seed=0)


def _to_device(device: torch.device, state: State) -> dict[str, Tensor]:
    return {name: tensor.to(device, copy=True) for name, tensor in state.items()}
