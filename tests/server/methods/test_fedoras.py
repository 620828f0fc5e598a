"""FedorAS: what clients are sent, and how operators are aggregated (O1, O2)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from server.aggregating import aggregate_clients
from torch import Tensor

from subfleet.elastic.cost import Costs
from subfleet.elastic.families.records.choices import ChoiceCnn
from subfleet.elastic.network import Network
from subfleet.elastic.supernets import path_architecture
from subfleet.methods.assigner import Assignment, WrittenSize
from subfleet.methods.fedoras import FedorAS, draw_tier
from subfleet.methods.tier_search import list_network_tiers
from subfleet.protocol.chains import Chain, Link, LinkOperator
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import AcceptedUpdate
from subfleet.search.candidates import Obstacle
from subfleet.search.queue import ProgramFacts
from subfleet.search.supernets import find_tier
from subfleet.settings.samples import DataSettings
from subfleet.testing.rounds import (
    DrawnClient,
    draw_change,
    draw_state,
    make_assignee,
    make_context,
    store_update,
)
from subfleet.transport.blob_store import BlobStore

MODEL = ChoiceCnn(
    input_shape=(1, 8, 8),
    class_count=4,
    widths=(4, 8),
    depths=(2, 2),
    last_widths=(4,),
    operators=(("conv1", "conv3", "dsconv3", "mbconv3_double", "identity"),),
    group_size=2,
)
CLIENTS = tuple(
    DrawnClient(name=name, size=0, samples=samples) for name, samples in (("ada", 10), ("bob", 30), ("cyd", 20))
)
FLOAT_BYTES = 4
Counts = Mapping[str, Mapping[str, int]]


def context_of(**settings: object) -> RunContext:
    data = DataSettings(test="unused", validation_samples=1)
    return make_context(FedorAS(**settings), MODEL, data=data)  # type: ignore[arg-type]


CONTEXT = context_of()
NETWORK = CONTEXT.network
CHOICES = tuple(NETWORK.choices)


# --- how operators are aggregated -------------------------------------------------------------------------------------


def aggregate_examples(
    context: RunContext, drawn: Sequence[Counts], folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model before and after a round, given how many examples of each client each operator saw."""
    state, blobs, clients = draw_state(context.network), BlobStore(folder), []
    for client, counts in zip(CLIENTS, drawn, strict=True):
        examples: OperatorExamples = tuple((name, tuple(own.items())) for name, own in counts.items())
        stored = store_update(context, client, blobs)
        assert stored.update is not None
        clients.append(
            replace(stored, trained=AcceptedUpdate(update=replace(stored.update, operator_examples=examples)))
        )
    aggregated = aggregate_clients(context, blobs, state, 1, clients, context.roles.memory.initial)
    assert not aggregated.refused
    return dict(state.shared), dict(aggregated.state.shared)


def mean_change(name: str, weights: Sequence[float]) -> Tensor:
    changes = [draw_change(CONTEXT, client, 1)[name].double() for client in CLIENTS]
    total = math.fsum(weights)
    return sum(
        (weight / total * change for weight, change in zip(weights, changes, strict=True)), torch.zeros(()).double()
    )


def count_everywhere(operator: str, count: int) -> Counts:
    return {choice: {operator: count} for choice in CHOICES}


@pytest.mark.slow
def test_with_one_operator_at_each_place_it_is_federated_averaging_by_examples(tmp_path: Path) -> None:
    """O1."""
    before, after = aggregate_examples(CONTEXT, [count_everywhere("conv3", count) for count in (40, 120, 80)], tmp_path)
    path = NETWORK.shapes(path_architecture(NETWORK, ["conv3"] * len(CHOICES)))
    for name, tensor in after.items():
        moved = tensor.double() - before[name].double()
        if name in path:
            torch.testing.assert_close(moved, mean_change(name, (40, 120, 80)), atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(tensor, before[name])


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 2])
def test_an_operator_that_too_few_clients_drew_stays_to_the_bit(least: int, tmp_path: Path) -> None:
    """O2: the public code maps no searchable tensor to its operator, and keeps what only one client trained."""
    context = context_of(min_contributors=least)
    drawn = [
        count_everywhere("conv1", 40),
        {**count_everywhere("conv1", 60), CHOICES[0]: {"conv3": 60}},
        count_everywhere("conv1", 80),
    ]
    before, after = aggregate_examples(context, drawn, tmp_path)
    for name, tensor in after.items():
        part = NETWORK.tensors[name].part
        alone = part == f"{CHOICES[0]}.conv3"
        drawn_by_two = part is None or part.endswith(".conv1")
        assert torch.equal(tensor, before[name]) == (not drawn_by_two and not (alone and least == 1))
        if alone and least == 1:
            moved = tensor.double() - before[name].double()
            torch.testing.assert_close(moved, mean_change(name, (0, 1, 0)), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_each_operator_counts_by_its_own_examples_and_what_is_always_on_by_all(tmp_path: Path) -> None:
    """Equation 5."""
    examples = ((10, 30), (90, 30), (60, 0))
    drawn = [{choice: {"conv1": first, "dsconv3": second} for choice in CHOICES} for first, second in examples]
    before, after = aggregate_examples(CONTEXT, drawn, tmp_path)
    for name, tensor in after.items():
        part = NETWORK.tensors[name].part
        moved = tensor.double() - before[name].double()
        if part is None:
            weights: Sequence[float] = [sum(counts) for counts in examples]
        elif part.endswith((".conv1", ".dsconv3")):
            weights = [counts[part.endswith(".dsconv3")] for counts in examples]
        else:
            assert torch.equal(tensor, before[name])
            continue
        torch.testing.assert_close(moved, mean_change(name, weights), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_plain_averaging_counts_samples_whatever_was_drawn(tmp_path: Path) -> None:
    examples = ((10, 30), (90, 30), (60, 0))
    drawn = [{choice: {"conv1": first, "dsconv3": second} for choice in CHOICES} for first, second in examples]
    before, after = aggregate_examples(context_of(aggregation="clients"), drawn, tmp_path)
    for name, tensor in after.items():
        moved = tensor.double() - before[name].double()
        torch.testing.assert_close(
            moved, mean_change(name, [client.samples for client in CLIENTS]), atol=1e-6, rtol=1e-5
        )


# --- what clients are sent --------------------------------------------------------------------------------------------


def assign(context: RunContext, name: str = "ada", **budget: int) -> Assignment:
    assignee = make_assignee(context, name)
    return context.roles.assigner.assign(replace(assignee, budget=replace(assignee.budget, **budget)))


def parts_of(context: RunContext) -> Mapping[str, tuple[int, int]]:
    return Costs(context.network).compute_by_part(context.network.full_architecture())


def operator_bytes(context: RunContext, architecture: Architecture) -> int:
    parts = parts_of(context)
    return FLOAT_BYTES * sum(parts[part][0] for part in context.network.parts_of(architecture))


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_a_subspace_keeps_to_its_share_and_is_another_for_each_client(fraction: float) -> None:
    context = context_of(subspace=fraction)
    whole, placed = operator_bytes(context, NETWORK.full_architecture()), list[Architecture]()
    for number in range(20):
        assigned = assign(context, f"client-{number}")
        assert assigned.placed is not None
        assert assigned.candidate is not None
        assert (
            assigned.candidate.architecture.architecture_id == NETWORK.full_architecture().architecture_id
        )  # its program chains any drawn operators
        assert operator_bytes(context, assigned.placed) <= fraction * whole
        operators = context.network.operators_of(assigned.placed)
        assert all("identity" in names for names in operators.values())
        placed.append(assigned.placed)
    different = len({architecture.choices for architecture in placed})
    assert different == 1 if fraction == 1 else different > 10


def test_the_link_has_to_have_room_for_the_subspace() -> None:
    always = FLOAT_BYTES * parts_of(CONTEXT)[""][0]
    assigned = assign(CONTEXT, uplink_bytes=always + 2000)
    assert assigned.placed is not None
    assert operator_bytes(CONTEXT, assigned.placed) <= 2000
    refused = assign(CONTEXT, uplink_bytes=always - 1)
    assert refused.candidate is None
    assert refused.reason.startswith("no subspace of the supernet fits")


def test_an_operator_that_no_path_within_the_multiplications_has_is_not_sent() -> None:
    parts = parts_of(CONTEXT)
    heaviest = max(parts[f"{CHOICES[0]}.{operator}"][1] for operator in NETWORK.choices[CHOICES[0]].operators)
    most = parts[""][1] + heaviest - 1
    for number in range(10):
        assigned = assign(CONTEXT, f"client-{number}", forward_macs=most)
        assert assigned.placed is not None
        assert assigned.paths is not None
        assert assigned.paths.forward_macs == min(most, find_tier(list_network_tiers(NETWORK, 4), most).high_macs)
        operators = NETWORK.operators_of(assigned.placed)
        assert all(
            parts[""][1] + parts[f"{name}.{operator}"][1] <= most
            for name, names in operators.items()
            for operator in names
        )
    assert assign(CONTEXT, forward_macs=parts[""][1] - 1).candidate is None


def test_a_device_that_cannot_load_the_supernets_program_is_not_given_it_again() -> None:
    assignee = make_assignee(CONTEXT, "ada")
    (whole,) = assignee.candidates
    written = WrittenSize(size=whole.architecture, facts=ProgramFacts(planned_peak_bytes=1, chain=chain_of(NETWORK)))
    with_program = replace(assignee, written={whole.architecture.architecture_id: written})
    assert CONTEXT.roles.assigner.assign(with_program).candidate is not None
    refused = CONTEXT.roles.assigner.assign(
        replace(
            with_program, refused={whole.architecture.architecture_id: Obstacle(limit="runtime", why="it lacks Erf")}
        )
    )
    assert (refused.candidate, refused.reason) == (None, "the supernet was refused by the device: it lacks Erf")


def chain_of(network: Network) -> Chain:
    links = tuple(
        Link(
            name=name,
            operators=tuple(
                LinkOperator(name=operator, piece="", prefix=f"{name}.{operator}.") for operator in choice.operators
            ),
        )
        for name, choice in network.choices.items()
    )
    return Chain(links=links, fixed_bytes=0, runtime_bytes=())


def test_without_memory_for_the_leanest_path_nothing_is_sent() -> None:
    refused = assign(CONTEXT, memory_bytes=1000)
    assert refused.candidate is None
    assert "1000 bytes of memory" in refused.reason


def test_a_drawn_tier_is_a_clients_own_for_the_whole_run_and_bounds_its_multiplications() -> None:
    context = context_of(tiers_by="drawn", tiers=3)
    tiers = list_network_tiers(NETWORK, 3)
    seen_tiers = set()
    for number in range(30):
        assignee = make_assignee(context, f"client-{number}")
        tier = draw_tier(assignee.draw.seed, assignee.draw.client_id, 3)
        paths = context.roles.assigner.assign(assignee).paths
        assert paths is not None
        assert paths.forward_macs == tiers[tier - 1].high_macs
        seen_tiers.add(tier)
    assert seen_tiers == {1, 2, 3}
