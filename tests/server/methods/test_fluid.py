"""FLuID: which clients are stragglers, which neurons are invariant, and which are left out."""

import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from server.aggregating import aggregate_clients

from subfleet.elastic.axes import factors_of
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import ClientUpdate, Participant
from subfleet.methods.assigner import Draw
from subfleet.methods.fluid import FLuID, FluidMemory
from subfleet.methods.roles import ClosedRound, Roles, RoundUpdates
from subfleet.methods.selector import AvailableClient, LastUpdate, Selection, SelectionContext
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture, Explicit, Prefix
from subfleet.rounds.context import RunContext
from subfleet.testing.rounds import DrawnClient, draw_state, make_assignee, make_context, store_update
from subfleet.transport.blob_store import BlobStore

METHOD = FLuID(durations="measured")


@cache
def plan() -> RunContext:
    return make_context(METHOD)


def past(seconds: float, size: Architecture | None = None, architecture: Architecture | None = None) -> LastUpdate:
    size = size or plan().space[-1]
    return LastUpdate(
        round=1,
        size=size,
        architecture=architecture or size,
        sample_count=1,
        epochs=1,
        loss=1.0,
        square_loss=1.0,
        change_norm=1.0,
        train_s=0.0,
        took_s=seconds,
    )


def context_with(memory: FluidMemory, **seconds: float | None) -> SelectionContext:
    clients = tuple(
        AvailableClient(
            client_id=name,
            sample_count=1,
            budget=Budget(memory_bytes=1),
            past=None if elapsed_s is None else past(elapsed_s),
        )
        for name, elapsed_s in sorted(seconds.items())
    )
    return SelectionContext(clients=clients, count=0, round=2, memory=memory)


def select(roles: Roles, context: SelectionContext) -> Selection:
    return roles.selector.select(context)


def compute_shares(memory: FluidMemory, stragglers: int = 1, **seconds: float | None) -> dict[str, float]:
    memory_after = select(replace(METHOD, stragglers=stragglers).roles(), context_with(memory, **seconds)).memory
    return dict(memory_after.shares)


# --- stragglers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slowest_s", "share"),
    [(10.0, 0.95), (11.0, 0.95), (12.0, 0.85), (14.0, 0.75), (16.0, 0.65), (17.0, 0.5), (99.0, 0.5)],
)
def test_the_slowest_keeps_what_its_pace_allows(slowest_s: float, share: float) -> None:
    assert compute_shares(FluidMemory(), ada=10.0, bob=slowest_s + 0.001, cyd=3.0) == {"bob": share}


def test_nobody_is_slow_before_two_have_trained_the_whole_model() -> None:
    assert compute_shares(FluidMemory(), ada=None, bob=None) == {}
    assert compute_shares(FluidMemory(), ada=5.0, bob=None) == {}


def test_a_client_stays_a_straggler_by_its_time_for_the_whole_model() -> None:
    memory = FluidMemory(whole_s={"bob": 30.0})
    context = context_with(memory, ada=10.0, bob=4.0)
    fast = tuple(
        replace(client, past=past(4.0, plan().space[0])) if client.client_id == "bob" else client
        for client in context.clients
    )
    memory_after = select(METHOD.roles(), replace(context, clients=fast)).memory
    assert memory_after.shares == {"bob": 0.5}
    assert memory_after.whole_s == {"ada": 10.0, "bob": 30.0}


def test_several_may_be_slow_each_by_its_own_pace() -> None:
    assert compute_shares(FluidMemory(), 2, ada=10.0, bob=40.0, cyd=11.5, dan=1.0) == {"bob": 0.5, "cyd": 0.85}


# --- sizes ------------------------------------------------------------------------------------------------------------


def assign(memory: FluidMemory, name: str, memory_bytes: int = 2**40) -> Architecture:
    assignee = make_assignee(plan(), name, memory_bytes=memory_bytes)
    candidate = plan().roles.assigner.assign(replace(assignee, draw=replace(assignee.draw, memory=memory))).candidate
    assert candidate is not None
    return candidate.architecture


def test_stragglers_have_their_share_of_the_model_and_others_the_whole() -> None:
    memory = FluidMemory(shares={"bob": 0.5})
    assert assign(memory, "ada") == plan().space[-1]
    half = dict(assign(memory, "bob").axes)
    for name, axis in plan().network.axes.items():
        if name in half:
            prefix = half[name]
            assert isinstance(prefix, Prefix)
            assert prefix.size == math.ceil(0.5 * axis.size / axis.granularity) * axis.granularity


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75, 0.65, 0.5])
def test_a_share_that_is_rounded_to_a_size_of_another_name_is_that_size(share: float) -> None:
    """Two rates may cut a small axis to the same size."""
    size = assign(FluidMemory(shares={"bob": share}), "bob")
    sizes, own = plan().network.sizes(size), plan().network.axes
    least = {name: math.ceil(share * axis.size / axis.granularity) * axis.granularity for name, axis in own.items()}
    assert all(sizes[name] == least[name] for name, axis in own.items() if axis.kind not in ("class", "kernel"))


def test_a_client_that_cannot_carry_the_whole_model_trains_what_it_can() -> None:
    budget = plan().first.candidates[-1].training_memory_bytes["onnx"] - 1
    assert assign(FluidMemory(), "ada", budget) == plan().space[-2]


# --- which neurons ----------------------------------------------------------------------------------------------------


def place_left_out(memory: FluidMemory, size: Architecture, seed: int = 0) -> dict[str, set[int]]:
    """Return the groups that are left out, for each axis that is cut."""
    draw = Draw(seed=seed, round=3, client_id="bob", memory=memory)
    architecture = plan().roles.assigner.place(plan().network, size, draw)
    plan().network.check(architecture)
    left_out = {}
    for name, selection in architecture.axes:
        assert isinstance(selection, Explicit)
        axis = plan().network.axes[name]
        assert len(selection.indices) == dict(plan().network.sizes(size))[name]
        groups = {index // axis.granularity for index in selection.indices}
        left_out[name] = set(range(axis.size // axis.granularity)) - groups
    return left_out


def test_invariant_neurons_are_left_out_first_and_earlier_ones_before_all() -> None:
    size = assign(FluidMemory(shares={"bob": 0.5}), "bob")
    name = "section1.block0.inner"
    axis = plan().network.axes[name]
    count, step = axis.size // axis.granularity, axis.granularity
    few = {1, 3}
    changes = {name: tuple(0.1 if group in few else 2.0 for group in range(count))}
    memory = FluidMemory(changes=changes, thresholds={name: 0.1})
    seen: set[frozenset[int]] = set()
    for seed in range(20):
        left_out = place_left_out(memory, size, seed)[name]
        assert few <= left_out
        seen.add(frozenset(left_out))
    assert len(seen) > 1, "the others are drawn"
    many = {0, 1, 2, 3, 4}
    changes = {name: tuple(0.1 if group in many else 2.0 for group in range(count))}
    before = tuple(index for index in range(axis.size) if index // step not in (0, 4))
    memory = FluidMemory(changes=changes, thresholds={name: 0.1}, shared_indices={name: before})
    expected_count = len(place_left_out(memory, size)[name])
    for seed in range(20):
        left_out = place_left_out(memory, size, seed)[name]
        assert {0, 4} <= left_out <= many
        assert len(left_out) == expected_count == count // 2


def compute_changes(network: Network, trained: list[ClientUpdate], enough: int) -> dict[str, list[float]]:
    """Compute the changes element by element."""
    largest_changes: dict[str, list[float]] = {}
    for name, axis in network.axes.items():
        if axis.kind in ("class", "kernel"):
            continue
        groups = []
        for group in range(axis.size // axis.granularity):
            of_each = []
            for client in trained:
                largest = 0.0
                for tensor, change in client.change.items():
                    decl = network.tensors[tensor]
                    old = client.received[tensor]
                    assert all(
                        len(factors_of(axis_name, size)) == 1
                        for axis_name, size in zip(decl.axes, decl.shape, strict=True)
                    )
                    for dim in range(change.dim()):
                        if decl.axes[dim] != name:
                            continue
                        for index in range(group * axis.granularity, (group + 1) * axis.granularity):
                            news = change.select(dim, index).flatten().tolist()
                            olds = old.select(dim, index).flatten().tolist()
                            for new, previous in zip(news, olds, strict=True):
                                ratio = abs(new) / abs(previous) if previous else (1e9 if new else 0.0)
                                largest = max(largest, min(ratio, 1e9))
                of_each.append(largest)
            groups.append(sorted(of_each)[enough - 1])
        largest_changes[name] = groups
    return largest_changes


def draw_updates(context: RunContext, count: int) -> list[ClientUpdate]:
    generator = torch.Generator().manual_seed(1)
    shared = dict(draw_state(context.network).shared)
    shared["head.bias"] = torch.zeros_like(shared["head.bias"])
    shared["stem.weight"] = shared["stem.weight"].clone()
    shared["stem.weight"][0, 0] = 0.0
    participants = [
        Participant(client_id=f"c{index}", architecture=plan().space[-1], size=plan().space[-1])
        for index in range(count)
    ]
    return [
        ClientUpdate(
            client=participant,
            weight=1.0,
            received=shared,
            change={name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in shared.items()},
        )
        for participant in participants
    ]


def test_a_neurons_change_is_the_largest_of_all_its_weights_at_enough_of_the_clients() -> None:
    context = plan()
    trained = draw_updates(context, 4)
    roles = METHOD.roles()
    assert roles.memory.observe is not None
    small = replace(trained[0], client=replace(trained[0].client, client_id="slow", size=context.space[0]))
    changes = roles.memory.observe(RoundUpdates(networks={"": context.network}, round=2, clients=(*trained, small)))
    expected = compute_changes(context.network, trained, enough=3)
    assert changes.keys() == expected.keys()
    for name, values in expected.items():
        assert list(changes[name]) == pytest.approx(values, rel=1e-6), name
    assert roles.memory.observe(RoundUpdates(networks={"": context.network}, round=2, clients=(small,))) == {}


# --- thresholds -------------------------------------------------------------------------------------------------------


def close_round(number: int, changes: tuple[float, ...] | None, **clients: LastUpdate) -> ClosedRound:
    return ClosedRound(round=number, clients=clients, observation=None if changes is None else {"inner": changes})


def test_thresholds_begin_with_the_smallest_change_and_grow_until_enough_are_invariant() -> None:
    remember: Any = replace(METHOD, growing_from=6, increment=1.0).roles().memory.remember
    memory = remember(FluidMemory(), close_round(1, (3.0, 5.0, 4.0, 6.0)))
    assert memory.thresholds == {"inner": 3.0}
    memory = remember(memory, close_round(2, (2.0, 5.0, 4.0, 6.0)))
    assert memory.thresholds == {"inner": 2.0}
    memory = remember(memory, close_round(3, (4.0, 5.0, 4.5, 6.0)))
    assert memory.thresholds == {"inner": 3.0}
    for number in range(4, 12):
        memory = replace(memory, shares={"bob": 0.5})
        memory = remember(memory, close_round(number, (4.0, 5.0, 4.5, 6.0)))
    # In rounds 6 and 8: with 5 there are the two invariant neurons of four that a half leaves out.
    assert memory.thresholds == {"inner": 5.0}
    assert memory.shares == {}


def test_a_round_without_observations_leaves_the_memory_unchanged() -> None:
    remember: Any = METHOD.roles().memory.remember
    memory = FluidMemory(changes={"inner": (1.0, 2.0)}, thresholds={"inner": 1.5}, whole_s={"ada": 2.0})
    assert remember(memory, close_round(4, None)) == replace(memory, shared_indices={})


def test_what_stragglers_kept_is_remembered() -> None:
    remember: Any = METHOD.roles().memory.remember
    ada, bob = (Architecture(axes=(("inner", Explicit(indices=indices)),)) for indices in ((0, 1, 4), (1, 4, 5)))
    memory = FluidMemory(shares={"ada": 0.5, "bob": 0.5})
    trained = {"ada": past(1.0, plan().space[0], ada), "bob": past(1.0, plan().space[0], bob), "cyd": past(1.0)}
    assert remember(memory, close_round(4, (1.0,), **trained)).shared_indices == {"inner": (1, 4)}


def test_observations_of_a_round_come_with_the_aggregated_model(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    clients = [
        store_update(plan(), DrawnClient(name=name, size=len(plan().space) - 1), blobs) for name in ("ada", "bob")
    ]
    aggregated = aggregate_clients(plan(), blobs, draw_state(plan().network), 1, clients, FluidMemory())
    axes = {name for name, axis in plan().network.axes.items() if axis.kind not in ("class", "kernel")}
    assert aggregated.observation.keys() == axes
    order = random.Random(1).sample(clients, len(clients))
    assert (
        aggregate_clients(plan(), blobs, draw_state(plan().network), 1, order, FluidMemory()).observation
        == aggregated.observation
    )


@pytest.mark.parametrize("changes", [{"stragglers": 0}, {"agreeing": 0.0}, {"increment": -1.0}, {"growing_from": 0}])
def test_parameters_out_of_their_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} (is )?"):
        replace(METHOD, **changes)
