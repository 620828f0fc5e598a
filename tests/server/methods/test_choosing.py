"""Client selection by Oort, PyramidFL and Power-of-choice, compared with their papers by hand and by counting."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from server.aggregating import aggregate_clients

from subfleet.arrays import encode_arrays
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Aggregator
from subfleet.methods.assigner import Draw
from subfleet.methods.claims import PastSelection, add_selection, bound_claims, find_overselected, trimmed_mean
from subfleet.methods.oort import Oort, OortMemory
from subfleet.methods.power_of_choice import PowerOfChoice
from subfleet.methods.pyramidfl import PyramidFL, PyramidMemory
from subfleet.methods.roles import ClosedRound, LocalTraining, Roles, Trainee
from subfleet.methods.selector import (
    AvailableClient,
    LastUpdate,
    Selection,
    SelectionContext,
    draw_without_replacement,
)
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.state import AcceptedUpdate
from subfleet.testing.rounds import DrawnClient, draw_change, draw_state, make_context, store_update
from subfleet.testing.submodels import find_held_elements
from subfleet.transport.blob_store import BlobStore

OORT = Oort(model="smallest")


def past(
    loss: float = 1.0, *, samples: int = 10, round_number: int = 1, took_s: float = 0.0, change_norm: float = 1.0
) -> LastUpdate:
    return LastUpdate(
        round=round_number,
        size=Architecture(),
        architecture=Architecture(),
        sample_count=samples,
        epochs=1,
        loss=loss,
        square_loss=loss**2,
        change_norm=change_norm,
        train_s=0.0,
        took_s=took_s,
    )


def make_client(
    name: str, known: LastUpdate | None = None, *, training_s: float = 1.0, samples: int = 10
) -> AvailableClient:
    return AvailableClient(
        client_id=name,
        sample_count=samples,
        budget=Budget(memory_bytes=1),
        expected_training_s=training_s,
        past=known,
    )


def context_with(
    *clients: AvailableClient, count: int, round_number: int = 2, memory: object = None, seed: int = 0
) -> SelectionContext:
    memory = OORT.roles().memory.initial if memory is None else memory
    return SelectionContext(clients=clients, count=count, round=round_number, seed=seed, memory=memory)


def select(roles: Roles, context: SelectionContext) -> Selection:
    return roles.selector.select(context)


@pytest.mark.slow
def test_a_weighted_draw_has_the_probabilities_of_drawing_one_after_the_other() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    total, draws = sum(weights.values()), 20_000
    expected = {
        (first, second): weights[first] / total * weights[second] / (total - weights[first])
        for first, second in permutations(weights, 2)
    }
    assert math.isclose(sum(expected.values()), 1.0)
    stream = random.Random(3)
    counts = Counter(draw_without_replacement(weights, 2, stream) for _ in range(draws))
    for pair, probability in expected.items():
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert abs(counts[pair] - draws * probability) < 4.5 * deviation, pair


def test_weights_of_0_come_last_and_a_draw_of_all_draws_all() -> None:
    weights = {"a": 0.0, "b": 1.0, "c": 0.0, "d": 3.0}
    assert set(draw_without_replacement(weights, 2, random.Random(1))) == {"b", "d"}
    assert draw_without_replacement(weights, 9, random.Random(1))[2:] == ("a", "c")
    assert draw_without_replacement({}, 3, random.Random(1)) == ()


def test_a_score_is_what_the_paper_says() -> None:
    # Utilities 10, 20 and 40; the preferred duration is the shortest, so that the slowest has (2 / 8)^2 of its score.
    clients = [
        make_client("ada", past(1.0, round_number=4), training_s=2.0),
        make_client("bob", past(2.0, round_number=1), training_s=2.0),
        make_client("cyd", past(4.0, round_number=2), training_s=8.0),
    ]
    scores = replace(OORT, clip=1.0).score(clients, 5, OortMemory(percentile=30.0))
    bonus = {name: math.sqrt(0.1 * math.log(5) / last) for name, last in (("ada", 4), ("bob", 1), ("cyd", 2))}
    assert scores == pytest.approx(
        {"ada": bonus["ada"], "bob": 10 / 30 + bonus["bob"], "cyd": (1 + bonus["cyd"]) / 16}, rel=1e-12
    )


def test_without_a_penalty_speed_makes_no_difference() -> None:
    blind = replace(OORT, penalty=0.0)
    known = [make_client(name, past(loss)) for name, loss in (("ada", 1.0), ("bob", 2.0), ("cyd", 3.0))]
    slow = [replace(client, expected_training_s=100.0 * index) for index, client in enumerate(known)]
    memory = OortMemory(percentile=30.0)
    assert blind.score(known, 3, memory) == blind.score(slow, 3, memory)
    assert OORT.score(known, 3, memory) != OORT.score(slow, 3, memory)


def test_a_client_that_claims_any_loss_is_worth_no_more_than_the_quantile() -> None:
    known = [make_client(f"c{index:02d}", past(1.0 + index / 20)) for index in range(20)]
    liar = [*known[:-1], replace(known[-1], past=past(1e9))]
    memory, cut = OortMemory(percentile=100.0), replace(OORT, clip=0.9)
    scores = cut.score(liar, 1, memory)
    assert scores["c19"] == scores["c18"] == 1.0 == max(scores.values())
    assert scores["c10"] == cut.score(known, 1, memory)["c10"]


@given(
    honest=st.lists(st.floats(0, 1e6), min_size=2, max_size=20),
    lies=st.lists(st.one_of(st.floats(-1e30, 1e30), st.just(1e300)), max_size=9),
)
def test_claims_are_bounded_by_honest_ones_while_these_are_the_majority(honest: list[float], lies: list[float]) -> None:
    lies = lies[: (len(honest) - 1) // 2]
    most = bound_claims([*honest, *lies])
    assert min(honest) <= most <= max(honest) + 3 * 1.4826 * (max(honest) - min(honest)) + 1e-6


@given(
    honest=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20),
    lie=st.sampled_from([1e30, -1e30, 1.7e308, 0.0]),
    weight=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_one_liar_moves_a_trimmed_mean_no_further_than_the_honest_are(
    honest: list[float], lie: float, weight: float
) -> None:
    mean = trimmed_mean([*honest, lie], [*[1.0] * len(honest), weight])
    assert min(honest) - 1e-6 <= mean <= max(honest) + 1e-6


@pytest.mark.parametrize("count", [3, 5, 10])
@pytest.mark.parametrize("kind", [Oort(model="smallest"), PowerOfChoice(), PyramidFL(oort=Oort(model="smallest"))])
@pytest.mark.parametrize("claim", ["loss", "samples", "both"])
def test_a_liar_is_chosen_for_its_claims_no_more_often_than_is_stated(kind: Any, count: int, claim: str) -> None:
    """One of 20 clients claims a loss of 1e30 or 2^40 samples: it is chosen 1.5 times its turn, plus random draws."""
    roles, last, chance = kind.roles(), dict[str, LastUpdate](), random.Random(count)
    memory, times, names = roles.memory.initial, Counter[str](), [f"c{index:02d}" for index in range(20)]
    loss, samples = (1e30 if claim != "samples" else 1.0), (2**40 if claim != "loss" else 10)
    for number in range(1, 41):
        clients = [
            make_client(name, last.get(name), samples=samples if name == "c07" else 5 + index)
            for index, name in enumerate(names)
        ]
        selection = select(roles, context_with(*clients, count=count, round_number=number, memory=memory))
        memory, updates = selection.memory, dict[str, LastUpdate]()
        for name in selection.clients:
            lies = name == "c07"
            updates[name] = past(
                loss if lies else chance.uniform(0.5, 2.0), samples=samples if lies else 10, round_number=number
            )
        last |= updates
        times.update(selection.clients)
        if roles.memory.remember is not None:
            memory = roles.memory.remember(memory, ClosedRound(round=number, clients=updates))
    fair = 40 * count / 20
    assert times.total() == 40 * count
    assert times["c07"] <= 1.5 * fair + 2 + 0.1 * 40
    assert min(times[name] for name in names) >= 1


def list_overselected(
    selections: Sequence[PastSelection], number: int, count: int, known: int, most_often: float = 1.5
) -> frozenset[str]:
    context = context_with(*[make_client(f"c{index}") for index in range(known)], count=count, round_number=number)
    return find_overselected(context, selections, count, most_often)


def _count_selections(rounds: range, takes_part: Callable[[int, bool], bool], *, count: int, known: int) -> int:
    """Count the rounds that select a liar who is selected whenever it takes part and is not overselected."""
    choices = tuple(PastSelection(round=number, clients=()) for number in range(1, rounds.start))
    for number in rounds:
        barred = list_overselected(choices, number, count, known)
        chosen_now = takes_part(number, "eve" in barred) and "eve" not in barred
        for _ in range(3):  # a failed attempt does not count
            choices = add_selection(choices, number, ["eve"] if chosen_now else [])
    assert len(choices) < 40
    return sum("eve" in selection.clients for selection in choices)


@pytest.mark.parametrize(
    "takes_part",
    [lambda number, barred: True, lambda number, barred: not barred, lambda number, barred: number % 2 == 0],
)
def test_an_absent_or_late_client_has_no_more_turns(takes_part: Callable[[int, bool], bool]) -> None:
    """With 2 of 40 clients per round, 1.5 turns in 40 rounds are 3, whichever rounds these are."""
    assert _count_selections(range(1, 201), takes_part, count=2, known=40) <= 3
    assert _count_selections(range(101, 140), takes_part, count=2, known=40) <= 3


def test_a_fleet_that_grows_lets_nobody_rest_for_longer_than_forty_rounds() -> None:
    always = [PastSelection(round=number, clients=("ada",)) for number in range(62, 101)]
    choices = tuple(always)
    for number in range(101, 141):
        choices = add_selection(choices, number, [])
    assert list_overselected(choices, 141, 10, 100) == frozenset()
    assert list_overselected(always, 101, 10, 100) == {"ada"}
    assert list_overselected(always, 101, 10, 100, 0.0) == frozenset()


def test_measured_seconds_take_the_place_of_expected_ones_where_there_are_any() -> None:
    quick, slow = make_client("ada", past(took_s=9.0), training_s=1.0), make_client("bob", past(), training_s=2.0)
    memory = OortMemory(percentile=60.0)
    assert OORT.compute_preferred_s([quick, slow], memory) == 9.0
    assert replace(OORT, durations="expected").compute_preferred_s([quick, slow], memory) == 2.0


@pytest.mark.parametrize(("round_number", "explored"), [(1, 9), (20, 6), (200, 3)])
def test_the_share_that_explores_falls_to_its_least(round_number: int, explored: int) -> None:
    known = [make_client(f"known{index:02d}", past()) for index in range(20)]
    new = [make_client(f"new{index:02d}") for index in range(20)]
    selection = OORT.select(context_with(*known, *new, count=10, round_number=round_number))
    assert sum(name.startswith("new") for name in selection.clients) == explored
    assert len(set(selection.clients)) == 10
    assert set(selection.memory.exploiting) == {name for name in selection.clients if name.startswith("known")}


def test_fast_clients_are_explored_more_often() -> None:
    new = [make_client(f"c{index}", training_s=1.0 if index < 5 else 50.0) for index in range(10)]
    counts = Counter(
        name for seed in range(200) for name in OORT.select(context_with(*new, count=3, seed=seed)).clients
    )
    assert min(counts[f"c{index}"] for index in range(5)) > 5 * max(counts[f"c{index}"] for index in range(5, 10))


def test_only_clients_close_to_the_best_are_drawn() -> None:
    known = [make_client(f"c{index}", past(10.0 - index)) for index in range(10)]
    strict = replace(OORT, cutoff=1.0, least_exploration=0.0, exploration=0.0, clip=1.0)
    for seed in range(20):
        assert set(strict.select(context_with(*known, count=3, seed=seed)).clients) == {"c0", "c1", "c2"}
    loose = replace(strict, cutoff=0.3)
    names = {name for seed in range(200) for name in loose.select(context_with(*known, count=3, seed=seed)).clients}
    assert {"c0", "c3", "c5"} <= names
    assert "c9" not in names


def remember_sums(method: Oort, sums: list[float]) -> OortMemory:
    """Return the memory after rounds in which one client had these sums of utility."""
    memory: OortMemory = method.roles().memory.initial
    for number, utility in enumerate(sums, start=1):
        memory = replace(memory, exploiting=("ada",))
        memory = method.remember(memory, ClosedRound(round=number, clients={"ada": past(utility, samples=1)}))
    return memory


@pytest.mark.parametrize(
    ("sums", "percentile"),
    [
        ([5.0, 5.0], 30.0),  # there is no window before the first
        ([5.0, 5.0, 5.0, 5.4], 35.0),
        ([5.0, 5.0, 9.0, 9.0], 30.0),
        ([1.0, 1.0, 9.0, 9.0], 25.0),
        ([5.0, 5.0, 5.0, 5.4, 5.2, 5.2], 40.0),
    ],
)
def test_the_pacer_gives_more_time_where_nothing_more_is_gained(sums: list[float], percentile: float) -> None:
    assert remember_sums(replace(OORT, pacer_rounds=2), sums).percentile == percentile


def test_an_update_that_was_not_chosen_for_its_worth_does_not_move_the_pacer() -> None:
    memory = replace(OORT.roles().memory.initial, exploiting=("ada",))
    closed = ClosedRound(round=1, clients={"ada": past(2.0, samples=1), "bob": past(100.0)})
    assert OORT.remember(memory, closed).utilities == (2.0,)


@pytest.mark.parametrize(
    "changes", [{"clip": 0.0}, {"exploration": 2.0}, {"percentile": 0.0}, {"pacer_rounds": 0}, {"penalty": -1.0}]
)
def test_parameters_out_of_their_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} is"):
        replace(OORT, **changes)


@given(losses=st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=1, max_size=12), count=st.integers(1, 6))
def test_the_largest_losses_of_those_drawn_take_part(losses: list[float | None], count: int) -> None:
    clients = [
        make_client(f"c{index:02d}", None if loss is None else past(loss), samples=index + 1)
        for index, loss in enumerate(losses)
    ]
    method = PowerOfChoice(candidates=2.0)
    context = context_with(*clients, count=count)
    selected = select(method.roles(), context).clients
    most = bound_claims(client.sample_count for client in clients)
    weights = {client.client_id: float(min(client.sample_count, most)) for client in clients}
    drawn = draw_without_replacement(weights, 2 * count, context.stream("candidates"))
    last_losses = {client.client_id: math.inf if client.past is None else client.past.loss for client in clients}
    assert set(selected) <= set(drawn)
    assert len(selected) == min(count, len(clients))
    passed_over = [last_losses[name] for name in drawn if name not in selected]
    assert not passed_over or max(passed_over) <= min(last_losses[name] for name in selected)


def test_with_one_candidate_for_each_it_is_a_draw_by_samples() -> None:
    clients = [make_client(f"c{index}", past(float(index)), samples=index + 1) for index in range(6)]
    context = context_with(*clients, count=3)
    weights = {client.client_id: float(client.sample_count) for client in clients}
    selected = select(PowerOfChoice(candidates=1.0).roles(), context).clients
    assert set(selected) == set(draw_without_replacement(weights, 3, context.stream("candidates")))


def test_the_useful_send_more_and_the_fast_train_longer() -> None:
    method = PyramidFL(oort=replace(OORT, durations="expected"), idle=1.0)
    clients = [
        make_client("ada", past(change_norm=3.0), training_s=1.0),
        make_client("bob", past(change_norm=9.0), training_s=4.0),
        make_client("cyd", past(change_norm=1.0), training_s=2.0),
    ]
    roles = method.roles()
    memory = select(roles, context_with(*clients, count=0, memory=roles.memory.initial)).memory
    assert memory.left_out == pytest.approx({"bob": 0.1, "ada": 0.1 + 0.5 / 3, "cyd": 0.1 + 1.0 / 3})
    assert memory.passes == pytest.approx({"ada": 4.0, "bob": 1.0, "cyd": 2.0})
    draw = Draw(seed=0, round=2, client_id="ada", memory=memory)
    trainee = Trainee(draw=draw, size=Architecture(), tensors=("w",))
    assert roles.training.for_client(TrainingSettings(epochs=2), trainee).epochs == 8
    assert roles.memory.remember is not None
    after = roles.memory.remember(memory, ClosedRound(round=2))
    assert isinstance(after, PyramidMemory)
    assert not after.passes
    assert not after.left_out


def test_a_shorter_upload_shortens_the_round() -> None:
    method = PyramidFL(oort=replace(OORT, durations="expected"), idle=1.0, least_left_out=0.5, most_left_out=0.5)
    clients = [
        replace(make_client("ada", past(), training_s=1.0), expected_uplink_s=4.0),
        make_client("bob", past(), training_s=1.0),
    ]
    roles = method.roles()
    assert select(roles, context_with(*clients, count=0, memory=roles.memory.initial)).memory.passes["bob"] == 3.0


def test_a_method_that_transforms_whole_updates_sends_no_parts_of_them() -> None:
    with pytest.raises(ValueError, match="`sends` leaves tensors out of updates"):
        Roles(
            training=LocalTraining(sends=lambda trainee: frozenset(trainee.tensors)),
            aggregator=Aggregator(transform=lambda network, model, trained: []),
        )


@pytest.mark.slow
def test_what_is_not_sent_is_held_by_nobody(tmp_path: Path) -> None:
    context = make_context(PyramidFL())
    network: Network = context.network
    names = tuple(network.shapes(context.space[-1]))
    sent_tensors = {"ada": names[:2], "bob": names[1:3]}
    state, blobs, clients = draw_state(network), BlobStore(tmp_path), []
    for name, tensors in sent_tensors.items():
        drawn = DrawnClient(name=name, size=len(context.space) - 1)
        client = store_update(context, drawn, blobs)
        assert client.task is not None
        assert client.update is not None
        changes = draw_change(context, drawn, 1)
        ref = blobs.add(encode_arrays({tensor: changes[tensor].numpy() for tensor in tensors}))
        assert isinstance(client.task.work, Train)
        task = replace(client.task, work=replace(client.task.work, sends=tensors))
        client = replace(client, task=task, trained=AcceptedUpdate(update=replace(client.update, blob=ref)))
        clients.append(client)
    aggregated = aggregate_clients(context, blobs, state, 1, clients)
    assert not aggregated.refused
    whole = find_held_elements(network, context.space[-1])
    for name in network.tensors:
        changed = aggregated.state.shared[name] != state.shared[name]
        senders = [sender for sender, tensors in sent_tensors.items() if name in tensors]
        assert bool(changed.any()) == bool(senders), name
        if len(senders) == 1:  # a single sender counts in full, whatever its weight
            change = draw_change(context, DrawnClient(name=senders[0], size=len(context.space) - 1), 1)[name]
            torch.testing.assert_close(aggregated.state.shared[name] - state.shared[name], change, rtol=1e-4, atol=1e-6)
        assert whole[name].all()
