"""Defects of public implementations of these methods, each with a test that detects it."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL, random_state
from export.step_rig import example, next_inputs, run, step_of_module
from server.methods.method_cases import OF_ONE_NETWORK
from torch import Tensor

from subfleet.aggregation.views import Views
from subfleet.elastic.building import build_module
from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.elastic.maps import nested_maps, tensor_maps
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import BUFFER_ROLES, Family, Network
from subfleet.elastic.norm_layers import norm_tensors
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.export.steps import Student
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.aggregator import Participant
from subfleet.methods.anycostfl import AnycostFL
from subfleet.methods.assigner import Draw
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.federated_dropout import FederatedDropout
from subfleet.methods.fedprox import FedProx
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.fjord import FjORD
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.nefl import NeFL
from subfleet.methods.techniques import NormPolicy, Techniques
from subfleet.protocol.submodel import Architecture, Roll
from subfleet.rounds.context import RunContext
from subfleet.testing.rounds import (
    MODEL,
    SEED,
    DrawnClient,
    draw_change,
    draw_state,
    make_assignee,
    make_context,
    place_client,
    play,
    view_model,
    with_steps,
)
from subfleet.testing.submodels import find_held_elements

VARIANTS: Mapping[str, AnyMethod] = {
    **{name: kind() for name, kind in OF_ONE_NETWORK.items()},
    "fjord without a student": FjORD(self_distillation=False),
    "fedavg nested": FedAvg(model="nested"),
    "the paper's search": DynamicSelection(search="paper"),
}
EVERY = pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS.keys())
BATCH_NORM = replace(MODEL, norm="batch")
BOTTLENECK = CONVOLUTIONAL["bottleneck"]
RESNET = PreactResNet(input_shape=(1, 6, 6), class_count=4, widths=(8, 12), depths=(2, 2), group_size=2)


@functools.cache
def small_context(method: str) -> RunContext:
    """The context of a network with so few submodels that a search soon knows all of them."""
    return make_context(VARIANTS[method], replace(MODEL, widths=(8,), depths=(2,), group_size=4))


def total_bytes(context: RunContext) -> tuple[int, int]:
    """Return the memory and the weights of the largest size, in bytes."""
    largest = context.first.estimate(context.network.full_architecture())
    return largest.training_memory_bytes["onnx"], largest.weight_bytes


@pytest.mark.parametrize(
    "method", [HeteroFL(), FedRolex(), FederatedDropout(), AnycostFL()], ids=lambda method: method.TYPE
)
def test_a_budget_down_to_the_smallest_size_is_used_in_full(method: AnyMethod) -> None:
    """Plato's AnycostFL and FedRolex search only widths between a half and the whole."""
    context = make_context(method)
    needs = [candidate.training_memory_bytes["onnx"] for candidate in context.first.candidates]
    halves = [4 * size.parameters < total_bytes(context)[1] / 4 for size in context.first.candidates]
    assert any(halves), "the space goes below half the width"
    for index, need in enumerate(needs):
        chosen = context.roles.assigner.assign(make_assignee(context, "a", memory_bytes=need)).candidate
        assert (
            chosen
            == context.first.candidates[max(position for position, available in enumerate(needs) if available <= need)]
        )
        assert chosen.training_memory_bytes["onnx"] == need or index not in (0, len(needs) - 1)
    assert context.roles.assigner.assign(make_assignee(context, "a", memory_bytes=min(needs) - 1)).candidate is None


@pytest.mark.parametrize("kind", OF_ONE_NETWORK.values(), ids=OF_ONE_NETWORK.keys())
def test_tensors_that_are_tied_to_an_axis_keep_the_same_indices_of_it(kind: type[AnyMethod]) -> None:
    """FedRolex's random server draws a window for each convolution, although shortcuts add their channels."""
    context = make_context(kind(), RESNET)
    clients = [DrawnClient(name=name, size=size) for name, size in (("a", 0), ("b", len(context.space) // 2))]
    for client, number in itertools.product(clients, (1, 2, 5)):
        architecture = place_client(context, client, number)
        held_indices: dict[str, set[tuple[int, ...]]] = {}
        ones = {name: torch.ones(shape) for name, shape in context.network.shapes(architecture).items()}
        for name, tensor_map in tensor_maps(context.network, architecture).items():
            decl = context.network.tensors[name]
            held = torch.zeros(decl.shape)
            tensor_map.scatter(ones[name], held)
            for dim, axis in enumerate(decl.axes):
                if isinstance(axis, str):
                    rows = held.movedim(dim, 0).flatten(1).any(dim=1).nonzero().flatten() if held.dim() > 1 else None
                    rows = held.nonzero().flatten() if rows is None else rows
                    held_indices.setdefault(axis, set()).add(tuple(rows.tolist()))
        assert held_indices
        assert {axis: len(indices) for axis, indices in held_indices.items()} == dict.fromkeys(held_indices, 1)


def test_a_rolling_window_goes_on_by_one_group_each_round_and_never_jumps() -> None:
    """FedRolex's code reshuffles its windows in exactly the rounds in which it should not."""
    context = make_context(FedRolex())
    for size in (0, 1):
        starts: dict[str, list[int]] = {}
        for number in range(1, 14):
            architectures = {place_client(context, DrawnClient(name=name, size=size), number) for name in ("a", "b")}
            assert len(architectures) == 1, "all clients of a round have the same window"
            for name, window in next(iter(architectures)).axes:
                assert isinstance(window, Roll)
                starts.setdefault(name, []).append(window.start)
        for name, axis_starts in starts.items():
            axis = context.network.axes[name]
            steps = {(after - before) % axis.size for before, after in itertools.pairwise(axis_starts)}
            assert steps == {axis.granularity}


def _fjord_steps(
    weight: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Architecture, Network]:
    """Run a step on the same weights without and with FjORD's student.

    Return both results, the student's region, and the submodel and network that are trained.
    """
    context = make_context(FjORD())
    network, size = context.network, context.space[3]
    students = (
        context.roles.training.student(network, size, Draw(seed=SEED, round=number, client_id="a"))
        for number in range(1, 60)
    )
    inner = next(
        candidate
        for candidate in students
        if candidate is not None and network.parameter_count(candidate) < 0.4 * _count_parameters(context, size)
    )
    training, maps = context.training(1, student=inner), nested_maps(network, size, inner)
    student = Student(module=build_module(network, inner), maps=maps)
    shape = network.config.input_shape
    plain = step_of_module(build_module(network, size), shape)
    step = step_of_module(build_module(network, size), shape, objective=training.objective, student=student)
    inputs = example(step)
    with_student = run(step, inputs | {"distillation_weight": torch.tensor(weight, dtype=torch.float64)})
    without = run(plain, {value.name: inputs[value.name] for value in plain.inputs})
    region = {name: torch.zeros(shape) for name, shape in network.shapes(size).items()}
    for name, tensor_map in maps.items():
        tensor_map.scatter(torch.ones(network.shapes(inner)[name]), region[name])
    return without, with_student, region, size, network


def _count_parameters(context: RunContext, size: Architecture) -> int:
    return context.network.parameter_count(size)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_fjords_nested_width_trains_its_own_elements_of_the_very_network_and_no_others(weight: float) -> None:
    """Plato's FjORD trains a copy that is cut off from the network, and never on the labels.

    With a weight of 0 the nested width adds only its loss on the labels; with 1, only its distillation loss.
    """
    without, with_student, region, size, network = _fjord_steps(weight)
    moved = 0
    for name in network.shapes(size):
        plain, taught = without[f"new.parameter.{name}"], with_student[f"new.parameter.{name}"]
        outside = region[name] == 0
        assert torch.equal(plain[outside], taught[outside])
        moved += int((plain != taught).sum())
    inside = sum(int(tensor.sum()) for tensor in region.values())
    assert moved > 0.5 * inside, "most of the nested width's own elements learn from its terms"


def _measure_distance(mu: float) -> float:
    """Return the distance from the weights received after 40 local steps of FedProx."""
    context = make_context(FedProx(mu=mu))
    training = context.training(1)
    size = context.space[0]
    module = build_module(context.network, size)
    step = step_of_module(module, context.network.config.input_shape, objective=training.objective)
    inputs = example(step)
    received = {name: inputs[f"parameter.{name}"] for name in context.network.shapes(size)}
    inputs |= {f"anchor.{name}": tensor for name, tensor in received.items()}
    rate = {"learning_rate": torch.tensor(0.05).double(), "proximal_mu": torch.tensor(training.proximal_mu).double()}
    for _ in range(40):
        inputs = inputs | rate | next_inputs(run(step, inputs))
    squares = [(inputs[f"parameter.{name}"] - tensor).square().sum() for name, tensor in received.items()]
    return float(torch.stack(squares).sum().sqrt())


@pytest.mark.slow
def test_fedprox_holds_weights_near_those_received_the_more_the_larger_mu_is() -> None:
    """FedScale's FedProx has the sign that pushes them away."""
    free, near, nearer = (_measure_distance(mu) for mu in (0.0, 1.0, 19.0))
    assert 0 < nearer < 0.2 * near < near < 0.9 * free


@pytest.mark.parametrize(
    "method", [NeFL(), HeteroFL(depth=True), FedAvg(model="nested")], ids=lambda method: method.TYPE
)
def test_a_block_that_nobody_has_keeps_its_bits_for_those_who_will(method: AnyMethod, tmp_path: Path) -> None:
    """NeFL's code gives such blocks the value 0, after which nothing that they compute has a gradient."""
    context = make_context(method, replace(MODEL, learnable_steps=True))
    state = draw_state(context.network)
    blocks = context.space[0].blocks
    shallow = [index for index, size in enumerate(context.space) if size.blocks == blocks]
    whole = DrawnClient(name="whole", size=len(context.space) - 1)
    aggregated = play(
        context, state, [DrawnClient(name=f"client{index}", size=index) for index in shallow], tmp_path
    ).state
    names = [name for name, decl in context.network.tensors.items() if decl.part not in (None, *blocks)]
    assert names
    assert state.shared[names[0]].any()
    for name in names:
        assert torch.equal(view_model(context, aggregated, whole)[name], state.shared[name])


@pytest.mark.parametrize("model", [BOTTLENECK, BATCH_NORM], ids=["bottleneck", "batch norm"])
def test_heterofl_trains_networks_that_its_own_code_refuses(model: Family, tmp_path: Path) -> None:
    """HeteroFL's federated path has no rule for bottleneck blocks."""
    context = make_context(HeteroFL(class_mask=False), model)
    state = ModelState(shared=random_state(context.network, 3))
    client = DrawnClient(name="a", size=0)
    aggregated = play(context, state, [client], tmp_path).state.shared
    held, change = find_held_elements(context.network, context.space[0]), draw_change(context, client, 1)
    for name, tensor in aggregated.items():
        assert torch.equal(tensor[~held[name]], state.shared[name][~held[name]])
        if name in change:
            moved = (tensor - state.shared[name])[held[name]]
            torch.testing.assert_close(moved, change[name].flatten(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        HeteroFL(),
        FedRolex(),
        FederatedDropout(),
        FjORD(self_distillation=False),
        FedProx(model="nested"),
        DynamicSelection(distillation=None),
    ],
    ids=lambda method: method.TYPE,
)
def test_a_bank_of_norms_is_each_sizes_own(method: AnyMethod, tmp_path: Path) -> None:
    context = make_context(method, BATCH_NORM)
    context = replace(context, roles=context.roles.with_techniques(Techniques(norms="bank")))
    state = ModelState(shared=random_state(context.network, 3))
    small, large = DrawnClient(name="a", size=0), DrawnClient(name="b", size=len(context.space) - 1)
    norms = norm_tensors(context.network)
    assert any(context.network.tensors[name].role == "variance" for name in norms)
    before = play(context, state, [small, large], tmp_path).state
    after = play(context, before, [small], tmp_path, 2).state
    for name in norms:
        assert torch.equal(view_model(context, after, large)[name], view_model(context, before, large)[name])
        assert torch.equal(after.shared[name], state.shared[name])
    architecture = place_client(context, small, 2)
    moved = [
        name
        for name in norms & context.network.shapes(architecture).keys()
        if _has_moved(context, before, after, small, name)
    ]
    assert set(moved) == norms & context.network.shapes(architecture).keys()
    assert not torch.equal(
        view_model(context, after, large)["stem.weight"], view_model(context, before, large)["stem.weight"]
    )


def _has_moved(context: RunContext, before: ModelState, after: ModelState, client: DrawnClient, name: str) -> bool:
    return not torch.equal(view_model(context, after, client)[name], view_model(context, before, client)[name])


def _evaluate_losses(norms: NormPolicy, spoiled: bool = False) -> list[float]:
    """The loss of a submodel on the same samples, in batches of several sizes."""
    context = make_context(HeteroFL(), BATCH_NORM, norms=norms)
    state: Mapping[str, Tensor] = random_state(context.network, 3)
    if spoiled:
        roles = {name: decl.role for name, decl in context.network.tensors.items()}
        state = {name: tensor + 3 if roles[name] in ("mean", "variance") else tensor for name, tensor in state.items()}
    generator = torch.Generator().manual_seed(5)
    inputs, labels = torch.randn(40, 5, generator=generator), torch.randint(0, 4, (40,), generator=generator)
    size = context.space[1]
    client = Participant(client_id="a", architecture=size, size=size)
    views = Views(context=context, samples=inputs)
    used = views.prepare_tensors(views.of(ModelState(shared=state), client))
    return [evaluate(context.network, size, used, inputs, labels, batch_size=count).loss for count in (1, 7, 40)]


@pytest.mark.slow
def test_an_evaluation_with_measured_statistics_depends_on_no_batch_size() -> None:
    """FedRolex's code evaluates with the statistics of each test batch."""
    losses = _evaluate_losses("recalibrated")
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    # The earlier statistics do not matter; without the measurement they do.
    assert _evaluate_losses("recalibrated", spoiled=True) == pytest.approx(losses, rel=1e-5)
    assert _evaluate_losses("averaged", spoiled=True)[0] != pytest.approx(_evaluate_losses("averaged")[0], rel=1e-2)


@pytest.mark.slow
def test_what_the_whole_model_teaches_stays_in_it_and_noise_leaves_no_trace_in_statistics(tmp_path: Path) -> None:
    """Plato's in-place distillation throws its result away, and keeps the noise's running statistics."""
    context = make_context(DynamicSelection(distillation=DistillationSettings(iterations=3)), BATCH_NORM)
    untaught = replace(context, roles=with_steps(context.roles, distillation=None))
    state = ModelState(shared=random_state(context.network, 3))
    clients = [DrawnClient(name="a", size=0), DrawnClient(name="b", size=1)]
    before, after = (play(run_context, state, clients, tmp_path).state.shared for run_context in (untaught, context))
    buffers = {name for name, decl in context.network.tensors.items() if decl.role in BUFFER_ROLES}
    assert buffers
    assert all(torch.equal(before[name], after[name]) for name in buffers)
    assert not torch.equal(before["stem.weight"], after["stem.weight"])
