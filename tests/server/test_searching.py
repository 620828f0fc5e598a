"""A search between two rounds: one generation at a time, scored by the server, stored, and resumed."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from server.coordinator_cases import (
    select_requests,
)
from server.searching_cases import BY_SERVER, HELD_OUT, complete_generation, journal_in, run_search, supernet_round

from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.lineage import Chosen, Lineage
from subfleet.elastic.supernets import path_architecture
from subfleet.journal.networks import GenerationRecord, NetworkRecord, TuningRecord, build_tuning_record
from subfleet.journal.rows import build_record, build_round_record
from subfleet.link.traffic import Traffic
from subfleet.rounds.coordinator import step
from subfleet.rounds.signals import Close, CloseGeneration, RequestFailed, Tick
from subfleet.rounds.state import AcceptedUpdate, ClientState, RunState
from subfleet.rounds.work import GenerationRequest
from subfleet.testing.rounds import SUPERNET


@pytest.mark.slow
def test_generations_are_requested_one_at_a_time_and_their_networks_replace_the_supernet() -> None:
    state, actions = supernet_round(BY_SERVER)
    assert state.phase == "search"
    assert select_requests(GenerationRequest, actions) == [GenerationRequest(round=1, number=1)]
    waiting, more = step(BY_SERVER, state, Tick(), 5.5)
    assert (waiting.live.requested, more) == (state.live.requested, ())
    state, closed = run_search(BY_SERVER, state, actions)
    assert [close.generation.number for close in closed] == list(range(1, len(closed) + 1))
    assert {close.generation.tier for close in closed} == {1, 2}
    paths = [path for close in closed for path in close.generation.paths]
    assert len(paths) == len(set(paths)) == 9  # none of the nine paths is scored twice
    first, *lineages = state.lineages
    assert first.retired_round == 1
    assert [(lineage.id, lineage.parent, lineage.born_round) for lineage in lineages] == [("t1", "", 1), ("t2", "", 1)]
    best = max(
        (score, path) for close in closed for score, path in zip(close.scores, close.generation.paths, strict=True)
    )
    assert f"{best[0]:.4f}" in {lineage.reason.rpartition("score ")[2] for lineage in lineages}


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_round_of_the_supernet_costs_as_much_as_its_drawn_paths(index: int) -> None:
    """Its record has the cost of the drawn paths, not of the cheapest, and the parameters of sent operators alone."""
    context = BY_SERVER
    close = next(action for action in supernet_round(context)[1] if isinstance(action, Close))
    clients, expected = list[ClientState](), dict[str, tuple[float, int]]()
    for client in close.clients:
        assert client.update is not None
        assert client.architecture is not None
        operators, paths = context.network.operators_of(client.architecture), list[list[str]]()
        for turn in range(2):  # a quarter of its examples on one path, the rest on the other
            paths.append([own[(index + turn) % len(own)] for own in operators.values()])
        counts = (HELD_OUT // 4, HELD_OUT - HELD_OUT // 4)
        examples = tuple(
            (
                name,
                tuple(add_counts({path[position]: count} for path, count in zip(paths, counts, strict=True)).items()),
            )
            for position, name in enumerate(operators)
        )
        clients.append(
            replace(client, trained=AcceptedUpdate(update=replace(client.update, operator_examples=examples)))
        )
        macs = [
            estimate_cost(context.network, path_architecture(context.network, path), batch_size=1).forward_macs
            for path in paths
        ]
        mean = sum(count * path_macs for count, path_macs in zip(counts, macs, strict=True)) / HELD_OUT
        parts = Costs(context.network).compute_by_part(context.network.full_architecture())
        numbers = parts[""][0] + sum(parts[part][0] for part in context.network.parts_of(client.architecture))
        expected[client.client_id] = (mean, numbers)
    record = build_round_record(context, replace(close, clients=tuple(clients)), Traffic())
    for row in record.clients:
        macs_of, numbers = expected[row.client_id]
        assert row.forward_macs == pytest.approx(macs_of, abs=1)
        assert row.parameters == numbers
    cheapest = context.first.candidates[0].forward_macs
    assert any(row.forward_macs > cheapest for row in record.clients)


def add_counts(counts: Iterable[dict[str, int]]) -> Counter[str]:
    return sum(map(Counter, counts), Counter[str]())


def test_a_generation_that_is_not_awaited_changes_nothing() -> None:
    state, actions = supernet_round(BY_SERVER)
    event = complete_generation(BY_SERVER, state, actions)
    after, _ = step(BY_SERVER, state, event, 6.0)
    again, more = step(BY_SERVER, after, event, 6.5)
    assert (again.memory, again.generations) == (after.memory, 1)
    assert not any(isinstance(action, CloseGeneration) for action in more)


def test_a_search_that_fails_ends_the_run_and_says_why() -> None:
    state, actions = supernet_round(BY_SERVER)
    (request,) = select_requests(GenerationRequest, actions)
    state, _ = step(BY_SERVER, state, RequestFailed(request=request, reason="the search failed: no samples"), 6.0)
    assert state.phase == "failed"
    assert state.failure == ("generation 1 of the search after round 1 cannot be scored: the search failed: no samples")


@pytest.mark.slow
def test_a_run_that_is_resumed_after_any_generation_finds_the_same(tmp_path: Path) -> None:
    journal = journal_in(tmp_path, BY_SERVER)
    before, (state, actions) = RunState(), supernet_round(BY_SERVER)
    expected, closed = run_search(BY_SERVER, state, actions)
    journal.save(before, state)
    resumed = 0
    while state.phase == "search":
        state, actions = step(BY_SERVER, journal.load(0.0), Tick(), 1.0)
        before, (state, actions) = state, step(BY_SERVER, state, complete_generation(BY_SERVER, state, actions), 2.0)
        close = next((action for action in actions if isinstance(action, CloseGeneration)), None)
        record = None if close is None else build_record(BY_SERVER, close, Traffic())
        journal.save(before, state, close=close, record=record)
        resumed += 1
    assert resumed == len(closed) + 1
    assert state.lineages == expected.lineages
    assert [stored.number for stored in journal.generations()] == [close.generation.number for close in closed]


def generation(tier: int, best: float) -> GenerationRecord:
    path = ("conv1", "identity")
    return GenerationRecord(round=4, number=tier, tier=tier, paths=1, best=best, best_path=path, mean=best, seconds=1.0)


def network(name: str, accuracy: float | None, born_round: int = 4) -> NetworkRecord:
    lineage = Lineage(id=name, config=SUPERNET, parent="", map=Chosen(), born_round=born_round)
    return NetworkRecord(lineage=lineage, own_mean=accuracy)


FIRST = NetworkRecord(lineage=Lineage(id="", config=SUPERNET), own_mean=0.9)


@pytest.mark.parametrize(
    ("best", "accuracies", "expected"),
    [
        ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), TuningRecord(networks=3, tau=1.0)),
        ((0.3, 0.2, 0.1), (0.4, 0.5, 0.6), TuningRecord(networks=3, tau=-1.0)),
        ((0.1, 0.2, 0.3), (0.4, None, 0.6), TuningRecord(networks=2, tau=1.0)),
        ((0.1, 0.2, 0.3), (None, None, 0.6), TuningRecord(networks=1, tau=None)),
    ],
)
def test_ranks_before_and_after_fine_tuning_are_of_the_tiers_networks(
    best: tuple[float, ...], accuracies: tuple[float | None, ...], expected: TuningRecord
) -> None:
    """The best of each tier's generations counts, and no network that was there before."""
    generations = [generation(tier, score) for tier, score in enumerate(best, start=1)]
    worse = [replace(record, best=record.best - 1, number=record.number + len(best)) for record in generations]
    networks = [network(f"t{tier}", accuracy) for tier, accuracy in enumerate(accuracies, start=1)]
    assert build_tuning_record([*generations, *worse], [FIRST, *networks]) == expected


def test_without_a_search_or_before_its_end_nothing_ranks() -> None:
    assert build_tuning_record([], [FIRST]) is None
    assert build_tuning_record([generation(1, 0.1), generation(2, 0.2)], [FIRST]) is None
