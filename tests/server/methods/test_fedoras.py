"""FedorAS: what clients are sent, how operators aggregate (O1, O2), and who fine-tunes what."""

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


# --- how operators aggregate
# -----------------------------------------------------------------------------------------------


def aggregated(
    context: RunContext, drawn: Sequence[Counts], folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model before and after a round in which these many examples of each client went through its operators."""
    state, blobs, clients = draw_state(context.network), BlobStore(folder), []
    for client, counts in zip(CLIENTS, drawn, strict=True):
        examples: OperatorExamples = tuple((name, tuple(own.items())) for name, own in counts.items())
        stored = store_update(context, client, blobs)
        assert stored.update is not None
        clients.append(
            replace(stored, trained=AcceptedUpdate(update=replace(stored.update, operator_examples=examples)))
        )
    found = aggregate_clients(context, blobs, state, 1, clients, context.roles.memory.initial)
    assert not found.refused
    return dict(state.shared), dict(found.state.shared)


def mean_change(name: str, weights: Sequence[float]) -> Tensor:
    changes = [draw_change(CONTEXT, client, 1)[name].double() for client in CLIENTS]
    total = math.fsum(weights)
    return sum((weight / total * one for weight, one in zip(weights, changes, strict=True)), torch.zeros(()).double())


def everywhere(operator: str, count: int) -> Counts:
    return {choice: {operator: count} for choice in CHOICES}


@pytest.mark.slow
def test_with_one_operator_at_each_place_it_is_federated_averaging_by_examples(tmp_path: Path) -> None:
    """O1."""
    before, after = aggregated(CONTEXT, [everywhere("conv3", count) for count in (40, 120, 80)], tmp_path)
    path = NETWORK.shapes(path_architecture(NETWORK, ["conv3"] * len(CHOICES)))
    for name, tensor in after.items():
        moved = tensor.double() - before[name].double()
        if name in path:
            torch.testing.assert_close(moved, mean_change(name, (40, 120, 80)), atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("least", [1, 2])
def test_an_operator_that_too_few_clients_drew_stays_to_the_bit(least: int, tmp_path: Path) -> None:
    """O2: the public code maps no searchable tensor to its operator, and never drops what one client alone trained."""
    context = context_of(min_contributors=least)
    drawn = [everywhere("conv1", 40), {**everywhere("conv1", 60), CHOICES[0]: {"conv3": 60}}, everywhere("conv1", 80)]
    before, after = aggregated(context, drawn, tmp_path)
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
    shares = ((10, 30), (90, 30), (60, 0))
    drawn = [{choice: {"conv1": one, "dsconv3": other} for choice in CHOICES} for one, other in shares]
    before, after = aggregated(CONTEXT, drawn, tmp_path)
    for name, tensor in after.items():
        part = NETWORK.tensors[name].part
        moved = tensor.double() - before[name].double()
        if part is None:
            weights: Sequence[float] = [sum(own) for own in shares]
        elif part.endswith((".conv1", ".dsconv3")):
            weights = [own[part.endswith(".dsconv3")] for own in shares]
        else:
            assert torch.equal(tensor, before[name])
            continue
        torch.testing.assert_close(moved, mean_change(name, weights), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_plain_averaging_counts_samples_whatever_was_drawn(tmp_path: Path) -> None:
    shares = ((10, 30), (90, 30), (60, 0))
    drawn = [{choice: {"conv1": one, "dsconv3": other} for choice in CHOICES} for one, other in shares]
    before, after = aggregated(context_of(aggregation="clients"), drawn, tmp_path)
    for name, tensor in after.items():
        moved = tensor.double() - before[name].double()
        torch.testing.assert_close(moved, mean_change(name, [one.samples for one in CLIENTS]), atol=1e-6, rtol=1e-5)


# --- what clients are sent --------------------------------------------------------------------------------------------


def given(context: RunContext, name: str = "ada", **budget: int) -> Assignment:
    asked = make_assignee(context, name)
    return context.roles.assigner.assign(replace(asked, budget=replace(asked.budget, **budget)))


def parts_of(context: RunContext) -> Mapping[str, tuple[int, int]]:
    return Costs(context.network).compute_by_part(context.network.full_architecture())


def operator_bytes(context: RunContext, architecture: Architecture) -> int:
    parts = parts_of(context)
    return FLOAT_BYTES * sum(parts[part][0] for part in context.network.parts_of(architecture))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_subspace_keeps_to_its_share_and_is_another_for_each_client(share: float) -> None:
    context = context_of(subspace=share)
    whole, found = operator_bytes(context, NETWORK.full_architecture()), list[Architecture]()
    for number in range(20):
        assigned = given(context, f"client-{number}")
        assert assigned.placed is not None
        assert assigned.candidate is not None
        assert (
            assigned.candidate.architecture.architecture_id == NETWORK.full_architecture().architecture_id
        )  # whose program chains whatever is drawn
        assert operator_bytes(context, assigned.placed) <= share * whole
        kept = context.network.operators_of(assigned.placed)
        assert all("identity" in own for own in kept.values())
        found.append(assigned.placed)
    different = len({one.choices for one in found})
    assert different == 1 if share == 1 else different > 10


def test_the_link_has_to_have_room_for_the_subspace() -> None:
    always = FLOAT_BYTES * parts_of(CONTEXT)[""][0]
    assigned = given(CONTEXT, uplink_bytes=always + 2000)
    assert assigned.placed is not None
    assert operator_bytes(CONTEXT, assigned.placed) <= 2000
    refused = given(CONTEXT, uplink_bytes=always - 1)
    assert refused.candidate is None
    assert refused.reason.startswith("no subspace of the supernet fits")


def test_an_operator_that_no_path_within_the_multiplications_has_is_not_sent() -> None:
    parts = parts_of(CONTEXT)
    heaviest = max(parts[f"{CHOICES[0]}.{one}"][1] for one in NETWORK.choices[CHOICES[0]].operators)
    most = parts[""][1] + heaviest - 1
    for number in range(10):
        assigned = given(CONTEXT, f"client-{number}", forward_macs=most)
        assert assigned.placed is not None
        assert assigned.paths is not None
        assert assigned.paths.forward_macs == min(most, find_tier(list_network_tiers(NETWORK, 4), most).high_macs)
        kept = NETWORK.operators_of(assigned.placed)
        assert all(parts[""][1] + parts[f"{name}.{one}"][1] <= most for name, own in kept.items() for one in own)
    assert given(CONTEXT, forward_macs=parts[""][1] - 1).candidate is None


def test_a_device_that_cannot_load_the_supernets_program_is_not_given_it_again() -> None:
    asked = make_assignee(CONTEXT, "ada")
    (whole,) = asked.candidates
    written = WrittenSize(size=whole.architecture, facts=ProgramFacts(planned_peak_bytes=1, chain=chain_of(NETWORK)))
    told = replace(asked, written={whole.architecture.architecture_id: written})
    assert CONTEXT.roles.assigner.assign(told).candidate is not None
    refused = CONTEXT.roles.assigner.assign(
        replace(told, refused={whole.architecture.architecture_id: Obstacle(limit="runtime", why="it lacks Erf")})
    )
    assert (refused.candidate, refused.reason) == (None, "the supernet was refused by the device: it lacks Erf")


def chain_of(network: Network) -> Chain:
    links = tuple(
        Link(
            name=name,
            operators=tuple(LinkOperator(name=one, piece="", prefix=f"{name}.{one}.") for one in choice.operators),
        )
        for name, choice in network.choices.items()
    )
    return Chain(links=links, fixed_bytes=0, runtime_bytes=())


def test_without_memory_for_the_leanest_path_nothing_is_sent() -> None:
    refused = given(CONTEXT, memory_bytes=1000)
    assert refused.candidate is None
    assert "1000 bytes of memory" in refused.reason


def test_a_drawn_tier_is_a_clients_own_for_the_whole_run_and_bounds_its_multiplications() -> None:
    context = context_of(tiers_by="drawn", tiers=3)
    tiers = list_network_tiers(NETWORK, 3)
    found = set()
    for number in range(30):
        asked = make_assignee(context, f"client-{number}")
        tier = draw_tier(asked.draw.seed, asked.draw.client_id, 3)
        paths = context.roles.assigner.assign(asked).paths
        assert paths is not None
        assert paths.forward_macs == tiers[tier - 1].high_macs
        found.add(tier)
    assert found == {1, 2, 3}
