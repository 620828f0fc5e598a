"""A search between two rounds: a generation at a time, scored by the server or by devices, remembered, and taken up."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import (
    CLIENTS,
    blob,
    prepared,
    profile,
    scored_by_chance,
    task,
    telemetry,
    terms_of,
    update,
    wanted_of,
)
from server.fake_device import CLASSES

from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.lineage import Chosen, Lineage
from subfleet.elastic.paths import path_spec
from subfleet.journal.database import open_database
from subfleet.journal.generations import (
    GenerationRecord,
    TuningRecord,
    generation_record,
    generation_text,
    tuning_record,
)
from subfleet.journal.journal import Journal, begin_run
from subfleet.journal.networks import NetworkRecord
from subfleet.journal.rows import record_of, round_record
from subfleet.link.traffic import Traffic
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.subspacing import supernet_tiers
from subfleet.methods.tier_search import TierMemory, TierSearch
from subfleet.protocol.answers import Evaluated
from subfleet.protocol.chains import Chain, Link, LinkOperator
from subfleet.protocol.messages import Presence, Refusal
from subfleet.protocol.paths import PathScore
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.topics import Topics
from subfleet.rounds.actions import Action, Close, CloseGeneration, Reply, Request, SendTask
from subfleet.rounds.coordinator import resume_actions, step
from subfleet.rounds.events import Event, Failed, Folded, Ready, Tick, UpdateStored
from subfleet.rounds.requests import EvaluationMade, EvaluationWanted, GenerationMade, GenerationWanted
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms
from subfleet.rounds.written import ProgramFacts
from subfleet.search.path_evolution import EvolutionSettings
from subfleet.settings.samples import DataSettings
from subfleet.settings.timing import Deadlines
from subfleet.testing.rounds import SUPERNET

HELD_OUT = 10
Outcome = tuple[RunState, tuple[Action, ...]]
EVOLUTION = EvolutionSettings(evaluations=6, population=3, offspring=3)


def terms_with(search: TierSearch, **changes: Any) -> Terms:
    """A supernet of one round, and then two tiers."""
    method = FedorAS(supernet_rounds=1, tiers=2, search=search, min_contributors=1)
    data = DataSettings(test="server.server_rig:evaluation", validation_samples=5)
    model = replace(SUPERNET, class_count=CLASSES)
    return terms_of(**{"method": method, "model": model, "data": data, "rounds": 3, **changes})


BY_SERVER = terms_with(TierSearch(evolution=EVOLUTION))
SCORING = TierSearch(evolution=EVOLUTION, scoring="devices", scoring_clients=2, scoring_rounds=1)
BY_DEVICES = terms_with(replace(SCORING, scoring_rounds=2))
NOBODY = "no device that can compute its paths has scored them; see that some hold samples out"


def supernet_round(terms: Terms, held_out: int = HELD_OUT) -> Outcome:
    """The supernet's only round was folded at second 5, with all clients."""
    state = RunState()
    for name in CLIENTS:
        state, _ = step(terms, state, Presence(client_id=name, session_id=f"{name}-1", online=True), 1.0)
        state, _ = step(
            terms, state, replace(profile(name), input_shape=SUPERNET.input_shape, held_out_count=held_out), 1.0
        )
    for name in CLIENTS:
        state, _ = step(terms, state, telemetry(terms, name, state.round), 2.0)
    for name in CLIENTS:
        state, _ = step(terms, state, prepared(terms, state, name), 2.0)
    for name in CLIENTS:
        given = dict(task(state, name).spec.choices)
        kept = {one: given.get(one, choice.operators) for one, choice in terms.network.choices.items()}
        examples = tuple((choice, ((own[0], HELD_OUT),)) for choice, own in kept.items())
        told = replace(update(terms, state, name), operator_examples=examples)
        state, _ = step(terms, state, UpdateStored(update=told), 3.0)
    return step(terms, state, Folded(round=1, accuracy=0.2, loss=1.0, sha256="0" * 64, refused={}), 5.0)


def journal_in(folder: Path, terms: Terms) -> Journal:
    engine = open_database(folder)
    run_id = begin_run(engine, name="test", settings="{}", round_count=3)
    return Journal(engine, run_id, first_memory=terms.policies.memory)


def made_now(terms: Terms, state: RunState, actions: tuple[Action, ...]) -> GenerationMade:
    (wanted,) = wanted_of(GenerationWanted, actions)
    return scored_by_chance(terms, state, wanted)


def searched(terms: Terms, state: RunState, actions: tuple[Action, ...]) -> tuple[RunState, list[CloseGeneration]]:
    """The state after the whole search by the server, and what was recorded of it."""
    closed = list[CloseGeneration]()
    while state.phase == "search":
        made = made_now(terms, state, actions)
        state, actions = step(terms, state, Ready(made=made), 6.0)
        closed += [one for one in actions if isinstance(one, CloseGeneration)]
    return state, closed


def sent(state: RunState, actions: tuple[Action, ...], terms: Terms, now_s: float) -> RunState:
    """Everybody who is to score has its task."""
    program = ProgramRef(program_id="scores", target="onnx", blob=blob("scores"))
    for wanted in wanted_of(EvaluationWanted, actions):
        facts = ProgramFacts(planned_peak_bytes=1000)
        made: Event = Ready(made=EvaluationMade(wanted=wanted, program=program, weights=blob("w"), facts=facts))
        state, _ = step(terms, state, made, now_s)
    return state


def scored(
    state: RunState, terms: Terms, name: str, accuracies: tuple[float, ...], labels: int = HELD_OUT
) -> Evaluated:
    given = task(state, name)
    return Evaluated(
        task_id=given.task_id,
        run_id=terms.run_id,
        round=state.round,
        client_id=name,
        loss=1.0,
        accuracy=sum(accuracies) / len(accuracies),
        sample_count=HELD_OUT,
        label_count=labels,
        measured_peak_bytes=10,
        seconds=0.1,
        message_id=f"scores.{given.task_id}",
        scores=tuple(PathScore(loss=1.0, accuracy=one) for one in accuracies),
    )


# --- by the server ------------------------------------------------------------------------------------------------


def test_generations_are_asked_for_one_at_a_time_and_what_is_found_takes_the_place_of_the_supernet() -> None:
    state, actions = supernet_round(BY_SERVER)
    assert state.phase == "search"
    assert wanted_of(GenerationWanted, actions) == [GenerationWanted(round=1, number=1)]
    waiting, more = step(BY_SERVER, state, Tick(), 5.5)
    assert (waiting.asked, more) == (state.asked, ())
    state, closed = searched(BY_SERVER, state, actions)
    assert [one.generation.number for one in closed] == list(range(1, len(closed) + 1))
    assert {one.generation.tier for one in closed} == {1, 2}
    paths = [path for one in closed for path in one.generation.paths]
    assert len(paths) == len(set(paths)) == 9  # of nine paths that there are, none is scored twice
    first, *found = state.lineages
    assert first.retired_round == 1
    assert [(one.id, one.parent, one.born_round) for one in found] == [("t1", "", 1), ("t2", "", 1)]
    best = max((score, path) for one in closed for score, path in zip(one.scores, one.generation.paths, strict=True))
    assert f"{best[0]:.4f}" in {one.reason.rpartition("score ")[2] for one in found}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_round_of_the_supernet_takes_what_the_paths_that_were_drawn_take(place: int) -> None:
    """And not what the cheapest one takes, nor the numbers of operators that were not sent."""
    terms = BY_SERVER
    close = next(one for one in supernet_round(terms)[1] if isinstance(one, Close))
    seats, expected = list[Seat](), dict[str, tuple[float, int]]()
    for seat in close.seats:
        assert seat.result is not None
        assert seat.spec is not None
        kept, paths = terms.network.operators_of(seat.spec), list[list[str]]()
        for turn in range(2):  # of its examples a quarter went along the one path, and all others along the other
            paths.append([own[(place + turn) % len(own)] for own in kept.values()])
        counts = (HELD_OUT // 4, HELD_OUT - HELD_OUT // 4)
        told = tuple(
            (name, tuple(added({one[at]: count} for one, count in zip(paths, counts, strict=True)).items()))
            for at, name in enumerate(kept)
        )
        seats.append(replace(seat, result=replace(seat.result, operator_examples=told)))
        macs = [estimate_cost(terms.network, path_spec(terms.network, one), batch_size=1).forward_macs for one in paths]
        mean = sum(count * one for count, one in zip(counts, macs, strict=True)) / HELD_OUT
        parts = Costs(terms.network).of_parts(terms.network.full_spec())
        numbers = parts[""][0] + sum(parts[one][0] for one in terms.network.parts_of(seat.spec))
        expected[seat.client_id] = (mean, numbers)
    record = round_record(terms, replace(close, seats=tuple(seats)), Traffic(Topics("main")))
    for row in record.clients:
        macs_of, numbers = expected[row.client_id]
        assert row.forward_macs == pytest.approx(macs_of, abs=1)
        assert row.parameters == numbers
    cheapest = terms.candidates[0].forward_macs
    assert any(row.forward_macs > cheapest for row in record.clients)


def added(counts: Iterable[dict[str, int]]) -> Counter[str]:
    return sum(map(Counter, counts), Counter[str]())


def test_a_generation_that_nobody_waits_for_changes_nothing() -> None:
    state, actions = supernet_round(BY_SERVER)
    made = made_now(BY_SERVER, state, actions)
    after, _ = step(BY_SERVER, state, Ready(made=made), 6.0)
    again, more = step(BY_SERVER, after, Ready(made=made), 6.5)
    assert (again.memory, again.generations) == (after.memory, 1)
    assert not any(isinstance(one, CloseGeneration) for one in more)


def test_a_search_that_fails_ends_the_run_and_says_why() -> None:
    state, actions = supernet_round(BY_SERVER)
    (wanted,) = wanted_of(GenerationWanted, actions)
    state, _ = step(BY_SERVER, state, Failed(wanted=wanted, reason="the search failed: no samples"), 6.0)
    assert state.phase == "failed"
    assert state.failure == ("generation 1 of the search after round 1 cannot be scored: the search failed: no samples")


def test_a_run_that_is_taken_up_behind_any_generation_finds_the_same(tmp_path: Path) -> None:
    journal = journal_in(tmp_path, BY_SERVER)
    before, (state, actions) = RunState(), supernet_round(BY_SERVER)
    expected, closed = searched(BY_SERVER, state, actions)
    journal.save(before, state)
    taken_up = 0
    while state.phase == "search":
        state, actions = step(BY_SERVER, journal.load(0.0), Tick(), 1.0)
        before, (state, actions) = state, step(BY_SERVER, state, Ready(made=made_now(BY_SERVER, state, actions)), 2.0)
        close = next((one for one in actions if isinstance(one, CloseGeneration)), None)
        record = None if close is None else record_of(BY_SERVER, close, Traffic(Topics("main")))
        journal.save(before, state, close=close, record=record)
        taken_up += 1
    assert taken_up == len(closed) + 1
    assert state.lineages == expected.lineages
    assert [one.number for one in journal.generations()] == [one.generation.number for one in closed]


def generation(tier: int, best: float) -> GenerationRecord:
    path = ("conv1", "identity")
    return GenerationRecord(round=4, number=tier, tier=tier, paths=1, best=best, best_path=path, mean=best, seconds=1.0)


def network(name: str, accuracy: float | None, born_round: int = 4) -> NetworkRecord:
    lineage = Lineage(id=name, config=SUPERNET, parent="", map=Chosen(), born_round=born_round)
    return NetworkRecord(lineage=lineage, accuracy=accuracy)


FIRST = NetworkRecord(lineage=Lineage(id="", config=SUPERNET), accuracy=0.9)


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
    worse = [replace(one, best=one.best - 1, number=one.number + len(best)) for one in generations]
    networks = [network(f"t{tier}", accuracy) for tier, accuracy in enumerate(accuracies, start=1)]
    assert tuning_record([*generations, *worse], [FIRST, *networks]) == expected


def test_without_a_search_or_before_its_end_nothing_ranks() -> None:
    assert tuning_record([], [FIRST]) is None
    assert tuning_record([generation(1, 0.1), generation(2, 0.2)], [FIRST]) is None


# --- by devices ---------------------------------------------------------------------------------------------------


def opened(terms: Terms = BY_DEVICES, held_out: int = HELD_OUT, *, central: bool = True) -> Outcome:
    """Devices are asked for the first scores, at second 6."""
    state, actions = supernet_round(terms, held_out)
    made = replace(made_now(terms, state, actions), ticket="ab")
    return step(terms, state, Ready(made=made if central else replace(made, scores=())), 6.0)


def test_devices_are_sent_the_smallest_supernet_that_holds_the_paths() -> None:
    state, actions = opened()
    wanted = wanted_of(EvaluationWanted, actions)
    assert len(wanted) == len(state.seats) == 2
    assert state.scores is not None
    assert state.scores.made.generation is not None
    paths = state.scores.made.generation.paths
    for place, (name, choice) in enumerate(BY_DEVICES.network.choices.items()):
        held = dict(wanted[0].participant.spec.choices).get(name, choice.operators)
        assert set(held) == {path[place] for path in paths}
    state = sent(state, actions, BY_DEVICES, 6.0)
    given = [task(state, name) for name in state.seats]
    assert all(one.evaluation is not None and one.evaluation.population == paths for one in given)


@pytest.mark.parametrize(("share", "first"), [(1.0, 0.8), (0.5, 0.5)])
def test_scores_are_means_over_labels_of_all_rounds_and_rank_against_the_servers(share: float, first: float) -> None:
    """However many labels a device says to have counted, it has no more than its share of them."""
    terms = terms_with(replace(SCORING, scoring_rounds=2), max_client_share=share)
    state, actions = opened(terms)
    assert state.scores is not None
    central = state.scores.made.scores
    asked, record = list[set[str]](), None
    for now_s in (7.0, 8.0):
        state = sent(state, actions, terms, now_s)
        asked.append(set(state.seats))
        for number, name in enumerate(sorted(state.seats)):
            ranks = tuple(0.1 * (1 + sorted(central).index(one)) for one in central)
            told = scored(state, terms, name, ranks if number else (0.5,) * len(central), 2 if number else 8)
            state, actions = step(terms, state, told, now_s)
            assert [one.receipt.status for one in actions if isinstance(one, Reply)] == ["accepted"]
        closes = [one for one in actions if isinstance(one, CloseGeneration)]
        record = closes[0] if closes else record
    assert record is not None
    expected = [first * 0.5 + (1 - first) * 0.1 * (1 + sorted(central).index(one)) for one in central]
    assert record.scores == pytest.approx(expected)
    assert record.devices is not None
    assert record.devices.ranks == pytest.approx((1.0, 1.0))
    assert (record.devices.answers, record.devices.labels, record.devices.closed) == (4, 20, 2)
    text = generation_text(generation_record(record, Traffic(Topics("main"))))
    assert "4 answers of devices in 2 rounds" in text
    assert text.endswith("Kendall's tau against the server's own scores 1.00, 1.00")
    assert state.generations == 1
    assert isinstance(state.memory, TierMemory)
    assert wanted_of(GenerationWanted, actions) == [GenerationWanted(round=1, number=2)]


def _too_few(told: Evaluated) -> Evaluated:
    return replace(told, scores=told.scores[1:])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_too_few, "there are scores of 2 paths, but 3 were to be scored"),
        (lambda told: replace(told, label_count=11), "11 labels were counted, but 10 samples have 10 at most"),
        (lambda told: replace(told, sample_count=11), "11 samples were evaluated, but the client's profile has 10"),
    ],
)
def test_scores_are_believed_no_further_than_what_is_known(spoil: Callable[[Evaluated], Evaluated], words: str) -> None:
    state, actions = opened()
    state = sent(state, actions, BY_DEVICES, 6.0)
    name = min(state.seats)
    after, actions = step(BY_DEVICES, state, spoil(scored(state, BY_DEVICES, name, (0.1, 0.2, 0.3))), 7.0)
    (reply,) = [one.receipt for one in actions if isinstance(one, Reply)]
    assert (reply.status, reply.reason) == ("refused", words)
    assert after.seats[name].stage == "out"


@pytest.mark.parametrize("central", [False, True])
def test_a_device_that_refuses_or_is_silent_holds_nobody_up(central: bool) -> None:
    terms = terms_with(SCORING, deadlines=Deadlines(evaluate_s=50.0))
    state, actions = opened(terms, central=central)
    state = sent(state, actions, terms, 6.0)
    first, second = sorted(state.seats)
    refused = Refusal(
        task_id=task(state, first).task_id,
        run_id=terms.run_id,
        round=state.round,
        client_id=first,
        reason="memory",
        detail="as told",
    )
    state, _ = step(terms, state, refused, 7.0)
    assert state.seats[first].stage == "refused"
    after, actions = step(terms, state, scored(state, terms, second, (0.1, 0.2, 0.3)), 8.0)
    assert [one.scores for one in actions if isinstance(one, CloseGeneration)] == [pytest.approx((0.1, 0.2, 0.3))]
    assert after.generations == 1
    late, actions = step(terms, state, Tick(), 57.0)  # nobody has told anything
    if central:
        assert state.scores is not None
        assert [one.scores for one in actions if isinstance(one, CloseGeneration)] == [state.scores.made.scores]
    else:
        assert late.phase == "failed"
        assert late.failure.endswith(f"cannot be scored: {NOBODY}")


def test_a_tier_that_no_device_can_compute_has_no_network() -> None:
    """The rest of the search goes on: others have devices."""
    terms = terms_with(replace(SCORING, evolution=replace(EVOLUTION, evaluations=3)))
    state, actions = supernet_round(terms)
    poor = {
        name: replace(
            seat, budget=Budget(memory_bytes=2**40, forward_macs=supernet_tiers(terms.network, 2)[0].high_macs)
        )
        for name, seat in state.last.items()
    }
    state, now_s, tiers = replace(state, last=MappingProxyType(poor)), 6.0, list[int]()
    for _ in range(3):
        made = replace(made_now(terms, state, actions), ticket="ab", scores=())
        state, actions = step(terms, state, Ready(made=made), now_s)
        state = sent(state, actions, terms, now_s)
        for name in sorted(state.seats):
            state, actions = step(terms, state, scored(state, terms, name, (0.1, 0.2, 0.3)), now_s)
            tiers += [one.generation.tier for one in actions if isinstance(one, CloseGeneration)]
        if state.scores is not None:  # nobody could be asked
            now_s += terms.config.deadlines.evaluate_s
            state, actions = step(terms, state, Tick(), now_s)
        if state.phase != "search":
            break
    assert tiers == [1]
    assert [one.id for one in state.lineages] == ["", "t1"]


def test_what_its_runtime_lacks_a_device_does_not_score() -> None:
    """A target that cannot write an operator has no link with it."""
    state, actions = opened()
    program = ProgramRef(program_id="scores", target="onnx", blob=blob("scores"))
    wanted = wanted_of(EvaluationWanted, actions)[0]
    links = tuple(
        Link(name=name, operators=(LinkOperator(name="none", piece="", prefix=""),))
        for name in BY_DEVICES.network.choices
    )
    facts = ProgramFacts(planned_peak_bytes=1000, chain=Chain(links=links, fixed_bytes=0, runtime_bytes=()))
    made = EvaluationMade(wanted=wanted, program=program, weights=blob("w"), facts=facts)
    state, _ = step(BY_DEVICES, state, Ready(made=made), 6.0)
    seat = state.seats[wanted.client_id]
    assert (seat.stage, seat.reason) == (
        "skipped",
        "its runtime 'onnx' lacks an operator of what is to be evaluated",
    )


def test_where_nobody_holds_samples_out_the_search_ends_at_its_deadlines_and_says_so() -> None:
    state, actions = opened(held_out=0, central=False)
    now_s = 6.0
    while state.phase == "search":
        assert not wanted_of(EvaluationWanted, actions)
        now_s += BY_DEVICES.config.deadlines.evaluate_s
        state, actions = step(BY_DEVICES, state, Tick(), now_s)
        if wanted := wanted_of(GenerationWanted, actions):
            made = replace(scored_by_chance(BY_DEVICES, state, wanted[0]), ticket="ab", scores=())
            state, actions = step(BY_DEVICES, state, Ready(made=made), now_s)
    assert state.phase == "failed"
    assert state.failure.endswith(NOBODY)


def test_a_server_that_starts_anew_has_the_generation_scored_by_tasks_of_other_names(tmp_path: Path) -> None:
    journal = journal_in(tmp_path, BY_DEVICES)
    state, actions = supernet_round(BY_DEVICES)
    journal.save(RunState(), state)
    before, made = state, made_now(BY_DEVICES, state, actions)
    state, actions = step(BY_DEVICES, state, Ready(made=replace(made, ticket="ab")), 6.0)
    state = sent(state, actions, BY_DEVICES, 6.0)
    journal.save(before, state)
    names = {task(state, name).task_id for name in state.seats}
    taken_up = journal.load(0.0)
    assert (taken_up.phase, taken_up.scores, dict(taken_up.seats)) == ("search", None, {})
    assert not any(isinstance(one, SendTask) for one in resume_actions(BY_DEVICES, taken_up))
    asked = replace(taken_up, members=state.members, last=state.last)  # who took part is there again
    asked, actions = step(BY_DEVICES, asked, Tick(), 1.0)
    again = [one.wanted for one in actions if isinstance(one, Request)]
    assert again == [made.wanted]
    asked, actions = step(BY_DEVICES, asked, Ready(made=replace(made, ticket="cd")), 2.0)
    asked = sent(asked, actions, BY_DEVICES, 2.0)
    assert len(asked.seats) == 2
    assert not names & {task(asked, name).task_id for name in asked.seats}


def test_running_statistics_are_measured_by_the_server_alone() -> None:
    with pytest.raises(ValueError, match="running statistics of a supernet are those of no path"):
        terms_with(TierSearch(scoring="devices"), model=replace(SUPERNET, class_count=CLASSES, norm="batch"))
