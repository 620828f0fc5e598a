"""Programs that are written ahead of the rounds that want them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import (
    CLIENTS,
    looked_around,
    measuring,
    prepared,
    refusal,
    telemetry,
    terms_of,
    update,
    wanted_of,
    wish_of,
    written_ahead,
)
from server.methods.method_cases import QUICK
from server.server_rig import search_of

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.journal.rows import round_record
from subfleet.link.traffic import Traffic
from subfleet.methods.assigner import Assignment, AssignmentContext, Draw, WrittenSize
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.topics import Topics
from subfleet.rounds.actions import Action, AggregationRequest, Close
from subfleet.rounds.coordinator import resume_actions, step
from subfleet.rounds.events import Done, Tick
from subfleet.rounds.state import RunState
from subfleet.rounds.suspicion import ChangeSize
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import AggregatedRound, CheckRequest, ProgramRequest
from subfleet.search.fitting import INFINITE_BYTES
from subfleet.search.queue import SizedProgram, Wish
from subfleet.settings.timing import Deadlines
from subfleet.testing.rounds import with_steps

SEARCH = DynamicSelection(distillation=None, prices="estimated")


class Wishes:
    """An assignment that wants a place of the space for each client, and gives the smallest until it is written.

    Each loses a little more by smaller places. One that is never content wants its own again where it is written.
    """

    def __init__(self, *, content: bool = True, **places: int) -> None:
        self.content = content
        self.places = places
        self.seen: list[AssignmentContext] = []

    def __call__(self, ask: AssignmentContext) -> Assignment:
        self.seen.append(ask)
        place = self.places.get(ask.draw.client_id, 0)
        wanted = ask.candidates[place]
        ready = wanted == ask.candidates[0] or (self.content and wanted.spec.spec_id in ask.written)
        if ready and ask.allows(wanted):
            return Assignment(candidate=wanted)
        wish = Wish(program=SizedProgram(size=wanted.spec, target=ask.target), lost=(30 - place) / 100)
        return Assignment(candidate=ask.candidates[0], wanted=None if ready else wish)


def wishing(wishes: Wishes, **changes: Any) -> Terms:
    terms = terms_of(**changes)
    return replace(terms, roles=with_steps(terms.roles, assign=wishes))


def asked(terms: Terms, state: RunState, now_s: float = 2.0) -> tuple[RunState, list[SizedProgram]]:
    """Everybody has told what it can give; what is then to be written."""
    found: tuple[Action, ...] = ()
    for name in CLIENTS:
        state, actions = step(terms, state, telemetry(terms, name, state.round), now_s)
        found += actions
    assert state.phase == "train"
    state, found = looked_around(terms, state, found, now_s)
    return state, [one.program for one in wanted_of(ProgramRequest, found)]


def _price_bytes(terms: Terms, size: SubnetSpec | None) -> int:
    return 0 if size is None else terms.price(size).training_memory_bytes["onnx"]


def trained(terms: Terms, state: RunState, now_s: float = 3.0) -> tuple[RunState, tuple[Action, ...]]:
    """Everybody's program plans what its price says, and everybody's update is stored."""
    found: tuple[Action, ...] = ()
    for name in CLIENTS:
        event = prepared(terms, state, name, planned_peak_bytes=_price_bytes(terms, state.seats[name].size))
        state, _ = step(terms, state, event, now_s)
        state, actions = step(
            terms, state, Done(request=CheckRequest(update=update(terms, state, name)), result=ChangeSize()), now_s
        )
        found += actions
    return state, found


def folded(terms: Terms, state: RunState, now_s: float = 4.0) -> tuple[RunState, Close]:
    """The round is closed, and the next one is announced."""
    event = Done(
        request=AggregationRequest(round=state.round, seats=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    state, actions = step(terms, state, event, now_s)
    close = actions[0]
    assert isinstance(close, Close)
    return state, close


def written(terms: Terms, state: RunState, *, planned_peak_bytes: int | None = None) -> RunState:
    """All of the queue is written; programs plan what prices say, where nothing else is told."""
    for queued in state.queue:
        peak_bytes = planned_peak_bytes or _price_bytes(terms, queued.size)
        state, _ = step(terms, state, written_ahead(state, queued, peak_bytes), 3.0)
    return state


def places(terms: Terms, queue: list[SizedProgram] | tuple[SizedProgram, ...]) -> list[int]:
    sizes = [size.spec_id for size in terms.space]
    return [sizes.index(queued.size.spec_id) for queued in queue]


@pytest.mark.parametrize(("limit", "expected"), [(1, [3]), (2, [3, 1]), (4, [3, 1])])
def test_a_round_begins_so_many_programs_and_those_first_that_most_want(limit: int, expected: list[int]) -> None:
    terms = wishing(Wishes(ada=1, bob=3, cyd=3), exports_per_round=limit)
    state, exports = asked(terms, measuring(terms))
    assert places(terms, exports) == places(terms, state.queue) == expected
    assert {seat.size.spec_id for seat in state.seats.values() if seat.size} == {terms.space[0].spec_id}


def test_a_size_is_wanted_and_written_for_each_runtime_by_itself() -> None:
    wishes = Wishes(ada=2, bob=2, cyd=2)
    terms = wishing(wishes, exports_per_round=1)
    state = measuring(terms)
    other = replace(state.profiles["cyd"], runtimes=("executorch",))
    state = replace(state, profiles=state.profiles.updated({"cyd": other}))
    state, first = asked(terms, state)
    state, _ = folded(terms, written(terms, trained(terms, state)[0]))
    state, second = asked(terms, state)
    assert [(one.size, one.target) for one in (*first, *second)] == [
        (terms.space[2], "onnx"),
        (terms.space[2], "executorch"),
    ]
    smallest, wanted = terms.space[0].spec_id, terms.space[2].spec_id
    assert [set(ask.written) for ask in wishes.seen[3:]] == [{smallest, wanted}, {smallest, wanted}, {smallest}]


def test_nothing_is_begun_twice_whatever_is_under_way_or_written() -> None:
    wishes = Wishes(ada=1, bob=2, cyd=3)
    terms = wishing(
        wishes, exports_per_round=1, rounds=4, quorum=0.9
    )  # not strict: a round does not wait for the queue
    state, begun = asked(terms, measuring(terms))
    state, _ = folded(terms, trained(terms, state)[0])
    state, more = asked(terms, state)
    assert places(terms, state.queue) == [1, 2], "the first is still under way"
    assert places(terms, [*begun, *more]) == [1, 2]
    state, _ = step(terms, state, written_ahead(state, begun[0], 1000), 3.0)
    state, _ = folded(terms, trained(terms, state)[0])
    state, last = asked(terms, state)
    assert places(terms, last) == [3]
    assert places(terms, state.queue) == [2, 3]
    assert state.seats["ada"].size == terms.space[1]
    assert wish_of(state.seats["ada"]) is None


def test_what_is_written_is_not_written_again_even_where_a_method_asks_for_it() -> None:
    terms = wishing(Wishes(content=False, ada=2))
    state, begun = asked(terms, measuring(terms))
    state, _ = folded(terms, written(terms, trained(terms, state)[0]))
    state, again = asked(terms, state)
    assert (len(begun), again, state.queue) == (1, [], ())
    assert wish_of(state.seats["ada"]) == Wish(program=SizedProgram(size=terms.space[2], target="onnx"), lost=0.28)


def test_a_program_counts_from_the_next_round_on() -> None:
    wishes = Wishes(ada=2, bob=2, cyd=2)
    terms = wishing(wishes)
    state, (queued,) = asked(terms, measuring(terms))
    state, _ = step(terms, state, written_ahead(state, queued, 777), 3.0)
    assert (state.queue, state.written[queued.key].facts.planned_peak_bytes, state.written[queued.key].turn) == (
        (),
        777,
        1,
    )
    state, _ = step(terms, state, prepared(terms, state, "ada"), 3.0)
    step(terms, state, refusal(terms, state, "ada", available_bytes=10**6), 3.0)
    assert wishes.seen[-1].below is not None, "it asked again within the round"
    assert all(not ask.written for ask in wishes.seen), "also what its own tasks were made of counts later"
    state = replace(state, seats=MappingProxyType({**state.seats, "ada": replace(state.seats["ada"], stage="done")}))
    for name in CLIENTS[1:]:
        state, _ = step(terms, state, prepared(terms, state, name), 3.0)
        state, _ = step(
            terms, state, Done(request=CheckRequest(update=update(terms, state, name)), result=ChangeSize()), 3.0
        )
    state, close = folded(terms, state)
    assert close.exported == 2
    asked(terms, state)
    assert wishes.seen[-1].written == {
        terms.space[place].spec_id: WrittenSize(size=terms.space[place], planned_peak_bytes=peak)
        for place, peak in ((0, 1000), (2, 777))
    }


def test_what_was_never_queued_is_not_taken_for_written() -> None:
    terms = wishing(Wishes(ada=2))
    state, (queued,) = asked(terms, measuring(terms))
    stray = replace(queued, target="executorch")
    assert step(terms, state, written_ahead(state, stray, 1), 3.0) == (state, ())
    once, _ = step(terms, state, written_ahead(state, queued, 1), 3.0)
    assert step(terms, once, written_ahead(state, queued, 2), 3.0) == (once, ())


def is_folding(actions: tuple[Action, ...]) -> bool:
    return any(isinstance(action, AggregationRequest) for action in actions)


def test_a_strict_round_waits_for_the_queue_and_ends_with_its_last_program() -> None:
    terms = wishing(Wishes(ada=1, bob=2))
    state, exports = asked(terms, measuring(terms))
    state, actions = trained(terms, state)
    assert (state.phase, is_folding(actions)) == ("train", False)
    state, actions = step(terms, state, written_ahead(state, exports[0], 1), 5.0)
    assert (state.phase, is_folding(actions)) == ("train", False)
    state, actions = step(terms, state, written_ahead(state, exports[1], 1), 6.0)
    assert (state.phase, is_folding(actions)) == ("fold", True)


def test_the_deadline_ends_the_wait_for_the_queue() -> None:
    terms = wishing(Wishes(ada=1), deadlines=Deadlines(round_s=60.0))
    state, _ = trained(terms, asked(terms, measuring(terms))[0])
    assert step(terms, state, Tick(), 61.9)[0].phase == "train"
    state, actions = step(terms, state, Tick(), 62.0)
    assert (state.phase, is_folding(actions), len(state.queue)) == ("fold", True, 1)
    assert {seat.stage for seat in state.seats.values()} == {"done"}


def test_a_round_that_does_not_wait_for_the_slowest_does_not_wait_for_the_queue() -> None:
    terms = wishing(Wishes(ada=1), quorum=0.9)
    state, actions = trained(terms, asked(terms, measuring(terms))[0])
    assert (state.phase, is_folding(actions), len(state.queue)) == ("fold", True, 1)


@pytest.mark.parametrize("name", QUICK)
def test_no_method_gives_a_size_that_its_target_cannot_train(name: str) -> None:
    terms = terms_of(method=QUICK[name])
    broken = {size.spec_id: WrittenSize(size=size, planned_peak_bytes=INFINITE_BYTES) for size in terms.space[1:]}
    base = AssignmentContext(
        networks={"": terms.network},
        candidates=terms.candidates,
        price=terms.price,
        draw=Draw(seed=0, round=2, client_id="ada", memory=terms.roles.memory.initial),
        target="onnx",
        budget=Budget(memory_bytes=2**61),
        previous=None,
        written=broken,
        search=search_of(terms),
    )
    found = terms.roles.assigner.assign(base)
    assert found.candidate is not None
    assert found.candidate.spec.spec_id not in broken
    assert found.wanted is None or found.wanted.program.size.spec_id not in broken
    last = found.candidate.spec
    everything = {**broken, last.spec_id: WrittenSize(size=last, planned_peak_bytes=INFINITE_BYTES)}
    again = terms.roles.assigner.assign(replace(base, written=everything, previous=last))
    assert again.candidate is None or again.candidate.spec.spec_id not in everything


def _told(terms: Terms, state: RunState, budgets: Mapping[str, int]) -> tuple[RunState, list[SizedProgram]]:
    found: tuple[Action, ...] = ()
    for name in CLIENTS:
        event = telemetry(terms, name, state.round, memory_bytes=budgets[name])
        state, actions = step(terms, state, event, 2.0)
        found += actions
    state, found = looked_around(terms, state, found, 2.0)
    return state, [one.program for one in wanted_of(ProgramRequest, found)]


BUDGETS = {"ada": 13_000, "bob": 9_000, "cyd": 16_000}
"""Between the sizes of the uniform space, and above the largest."""


def _searched_once(terms: Terms) -> RunState:
    """The first round of a search, up to its end."""
    state, exports = _told(terms, measuring(terms), BUDGETS)
    assert exports, "what fits best has no program yet"
    return trained(terms, state)[0]


def test_a_size_that_cannot_be_written_is_neither_given_nor_queued_again() -> None:
    terms = terms_of(method=SEARCH)
    state = _searched_once(terms)
    queued = state.queue
    state, _ = folded(terms, written(terms, state, planned_peak_bytes=INFINITE_BYTES))
    state, again = _told(terms, state, BUDGETS)
    gone = {one.key for one in queued}
    assert not gone & {one.key for one in again}
    for seat in state.seats.values():
        assert seat.size is not None
        assert f"onnx/{seat.size.spec_id}" not in gone


def test_a_search_gets_what_it_wanted_one_round_later_and_the_records_say_so() -> None:
    terms = terms_of(method=SEARCH)
    state = _searched_once(terms)
    wanted = {
        name: None if (wish := wish_of(seat)) is None else wish.program.size for name, seat in state.seats.items()
    }
    state, close = folded(terms, written(terms, state))
    record = round_record(terms, close, Traffic(Topics()))
    # Three first programs, of which clients may share one, and those for the next round.
    assert record.programs_written == len({row.spec_id for row in record.clients}) + len(set(wanted.values()) - {None})
    for row in record.clients:
        better = wanted[row.client_id]
        if better is None:
            assert (row.wanted, row.parameters_lost) == ("", 0.0)
            continue
        assert row.wanted == better.name
        assert row.parameters_lost == pytest.approx(1 - row.parameters / terms.price(better).parameters)
        assert row.parameters_lost > 0
    assert {row.wanted for row in record.clients} != {""}
    state, exports = _told(terms, state, BUDGETS)
    given = {seat.size for seat in state.seats.values()}
    assert {f"onnx/{size.spec_id}" for size in given if size} <= {known.program.key for known in state.written.values()}
    assert given & {size for size in wanted.values() if size}
    state = trained(terms, state)[0]
    record = round_record(terms, folded(terms, written(terms, state))[1], Traffic(Topics()))
    assert record.programs_written == len(exports)


@pytest.mark.parametrize("phase", ["train", "fold"])
def test_a_server_that_starts_again_goes_on_writing(phase: str) -> None:
    terms = wishing(Wishes(ada=1, bob=2), quorum=1.0 if phase == "train" else 0.9)
    state, exports = asked(terms, measuring(terms))
    state, _ = trained(terms, state)
    assert state.phase == phase
    found = [one.program for one in wanted_of(ProgramRequest, resume_actions(terms, state))]
    assert found == exports
    state, _ = step(terms, state, written_ahead(state, exports[0], 1), 5.0)
    found = [one.program for one in wanted_of(ProgramRequest, resume_actions(terms, state))]
    assert found == exports[1:]


@pytest.mark.slow
def test_the_journal_gives_back_pool_plans_and_queue_and_the_search_goes_on_alike(tmp_path: Path) -> None:
    terms = terms_of(method=SEARCH, exports_per_round=2, quorum=0.9)
    engine = open_database(tmp_path)
    run_id = begin_run(engine, name="test", settings="{}", round_count=2)
    journal = Journal(engine, run_id)
    state = _searched_once(terms)
    state, _ = step(terms, state, written_ahead(state, state.queue[0], 5000), 3.0)
    assert state.pool
    assert state.queue
    journal.save(RunState(), state)
    loaded = Journal(open_database(tmp_path), run_id).load(9.0)
    assert (loaded.pool, loaded.queue, dict(loaded.written)) == (state.pool, state.queue, dict(state.written))
    there, back = (
        _told(fresh, folded(fresh, replace(one, live=replace(one.live, members=state.live.members)))[0], BUDGETS)
        for fresh, one in ((terms, state), (terms_of(method=SEARCH, exports_per_round=2, quorum=0.9), loaded))
    )
    assert [(seat.size, wish_of(seat)) for seat in there[0].seats.values()] == [
        (seat.size, wish_of(seat)) for seat in back[0].seats.values()
    ]
    assert (there[1], there[0].pool) == (back[1], back[0].pool)
