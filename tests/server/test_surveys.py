"""A survey decides what its clients' telemetry decides one by one, and is read only where that matters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import CLIENTS, context_of, measuring, profile, run_with_members, telemetry

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.methods.oort import Oort
from subfleet.protocol.messages import Ack, Presence, Telemetry
from subfleet.protocol.readings import Reading
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import Duty, Punctuality
from subfleet.rounds.offers import NOT_AVAILABLE
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.progress import Measuring
from subfleet.rounds.selection import NOT_DRAWN
from subfleet.rounds.signals import Action, Joined, Messages, Reply, Surveyed, Tick
from subfleet.rounds.state import Exclusion, OutlierDetection, RunState

NAMES = tuple(f"c{number}" for number in range(8))


@dataclass(kw_only=True)
class KnownSurvey:
    """The survey of telemetry that is known; it notes what is read."""

    telemetry: dict[str, Telemetry]
    run_id: str
    round: int = 1
    attempt: int = 0
    names: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    read_names: list[str] = field(default_factory=list)

    def read(self, client_id: str) -> Telemetry:
        self.read_names.append(client_id)
        return self.telemetry[client_id]


def survey_of(
    context: RunContext, names: Iterable[str], away: Iterable[str] = (), round_number: int = 1
) -> KnownSurvey:
    messages = {name: telemetry(context, name, round_number) for name in names}
    for name in away:
        messages[name] = replace(messages[name], reading=Reading(available=False))
    return KnownSurvey(
        telemetry=messages,
        run_id=context.run_id,
        round=round_number,
        names=frozenset(messages),
        away=frozenset(away),
    )


def begin(context: RunContext, foreign: Iterable[str] = (), excluded: Iterable[str] = ()) -> RunState:
    """Round 1 is announced to a fleet, some of which run another runtime or are excluded."""
    profiles = [replace(profile(name), runtimes=("other",) if name in foreign else ("onnx",)) for name in NAMES]
    state = run_with_members(*profiles, heard_s=1.0, session_id="s")
    exclusions = {name: Exclusion(until_round=2, reason="its update") for name in excluded}
    return replace(state, round=1, at=Measuring(), outliers=OutlierDetection(excluded=exclusions))


def without_ids(state: RunState) -> dict[str, set[str]]:
    """The names of idle clients by reason."""
    return {reason: {*names} for reason, names in state.idle.items()}


@given(
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
    st.integers(0, 3),
)
def test_a_survey_decides_as_messages_do(away: set[str], foreign: set[str], excluded: set[str], count: int) -> None:
    context = context_of(clients_per_round=count, min_clients=1)
    survey = survey_of(context, NAMES, away)
    begun = begin(context, foreign, excluded)
    apart, _ = step(context, begun, Messages(messages=tuple(survey.telemetry.values())), 1.0)
    together, _ = step(context, begun, Surveyed(survey=survey), 1.0)
    assert dict(together.clients) == dict(apart.clients)
    assert without_ids(together) == without_ids(apart)
    assert (together.phase, together.round, together.failed_attempts) == (
        apart.phase,
        apart.round,
        apart.failed_attempts,
    )


def list_notices(actions: Iterable[Action]) -> list[Reply]:
    """What clients are told that get no task."""
    return [action for action in actions if isinstance(action, Reply) and action.ack.message_id.startswith("skipped/")]


def test_only_drawn_clients_are_read() -> None:
    context = context_of(clients_per_round=2)
    survey = survey_of(context, NAMES, away=("c1",))
    state, _ = step(context, begin(context, foreign=("c2",)), Surveyed(survey=survey), 1.0)
    assert sorted(survey.read_names) == sorted(state.clients)
    assert {client.stage for name, client in state.clients.items() if name != "c2"} == {"preparing"}
    assert len(state.clients) == 3
    assert {reason: len(names) for reason, names in state.idle.items()} == {NOT_DRAWN: 4, NOT_AVAILABLE: 1}
    assert state.live.survey is None


def test_a_method_that_compares_clients_reads_all() -> None:
    context = context_of(clients_per_round=2, method=Oort())
    survey = survey_of(context, NAMES)
    state, _ = step(context, begin(context), Surveyed(survey=survey), 1.0)
    assert sorted(survey.read_names) == sorted(NAMES)
    assert len(state.clients) == 2


def test_extras_are_drawn_in_addition() -> None:
    context = context_of(clients_per_round=2)
    extra: Mapping[Duty, Punctuality] = {"training": Punctuality(missed=2)}
    state = begin(context)
    members = {name: replace(state.live.members[name], punctuality=extra) for name in ("c0", "c1", "c2")}
    state = replace(state, live=replace(state.live, members=state.live.members.with_items(members)))
    after, _ = step(context, state, Surveyed(survey=survey_of(context, NAMES)), 1.0)
    assert len(after.clients.keys() & members.keys()) == 2
    assert len(after.clients) == 4


@pytest.mark.parametrize("wrong", [{"run_id": "old"}, {"round": 2}, {"attempt": 1}])
def test_a_survey_of_another_round_counts_for_nothing(wrong: dict[str, object]) -> None:
    context = context_of()
    begun = begin(context)
    survey = survey_of(context, NAMES)
    for name, value in wrong.items():
        setattr(survey, name, value)
    assert step(context, begun, Surveyed(survey=survey), 1.0)[0] == begun


def test_a_profile_that_changes_is_judged_again() -> None:
    context = context_of(clients_per_round=8)
    begun = begin(context, foreign=("c0", "c1"))
    once, _ = step(context, begun, Surveyed(survey=survey_of(context, NAMES)), 1.0)
    assert {name for name, client in once.clients.items() if client.stage == "skipped"} == {"c0", "c1"}
    again = replace(begun, live=replace(begun.live, suitability=once.live.suitability))
    again, _ = step(context, again, profile("c0"), 1.0)
    again, _ = step(context, again, replace(profile("c3"), runtimes=("other",)), 1.0)
    twice, _ = step(context, again, Surveyed(survey=survey_of(context, NAMES)), 1.0)
    assert {name for name, client in twice.clients.items() if client.stage == "skipped"} == {"c1", "c3"}
    assert twice.live.suitability.runtimes == {"onnx": frozenset(NAMES) - {"c1", "c3"}}


def test_clients_that_join_together_join_as_one_by_one() -> None:
    context = context_of()
    joins = [
        message
        for name in CLIENTS
        for message in (Presence(client_id=name, session_id=f"{name}-1", online=True), profile(name))
    ]
    apart, _ = step(context, RunState(), Messages(messages=tuple(joins)), 1.0)
    together, _ = step(context, RunState(), Joined(profiles=tuple(map(profile, CLIENTS))), 1.0)
    assert replace(together, profiles=apart.profiles) == apart
    assert together.profiles.keys() == apart.profiles.keys()


def test_an_idle_client_is_told_once_and_with_every_heartbeat() -> None:
    context = context_of(clients_per_round=1)
    state, told = measuring(context), list[Reply]()
    for name in CLIENTS:
        state, actions = step(context, state, telemetry(context, name), 1.0)
        told += list_notices(actions)
    (drawn,) = state.clients
    assert sorted(notice.client_id for notice in told) == sorted({*CLIENTS} - {drawn})
    assert {notice.ack.reason for notice in told} == {NOT_DRAWN}
    for name in CLIENTS:
        alive = Presence(client_id=name, session_id=f"{name}-1", online=True)
        notices = list_notices(step(context, state, alive, 2.0)[1])
        assert [notice.ack for notice in notices] == [notice.ack for notice in told if notice.client_id == name]
    idle = told[0].client_id
    _, (answer,) = step(context, state, telemetry(context, idle), 2.0)
    assert isinstance(answer, Reply)
    assert answer.ack == replace(answer.ack, status="duplicate", reason="")
    assert isinstance(answer.ack, Ack)


def test_idle_clients_survive_a_restart(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2))
    context = context_of(clients_per_round=1)
    state, _ = step(context, begin(context), Surveyed(survey=survey_of(context, NAMES, away=("c1",))), 1.0)
    journal.save(RunState(), state)
    assert journal.load(2.0).idle == state.idle
    journal.save(state, state.without_clients())
    assert journal.load(2.0).idle == {}
    engine.dispose()


def test_a_failed_attempt_remembers_those_that_were_not_drawn() -> None:
    """A client that was not tried has neither failed nor recovered, and the reasons of all are counted."""
    context = context_of(clients_per_round=1)
    begun = begin(context, foreign=("c0",))
    state, _ = step(context, begun, Surveyed(survey=survey_of(context, NAMES, away=NAMES[1:])), 1.0)
    assert state.failed_attempts.failing.keys() == {"c0"}
    assert "c1, c2, c3 and 4 more skipped: the device is not available now" in state.failed_attempts.waits_for


@given(st.dictionaries(st.text(max_size=3), st.integers(), max_size=40), st.integers(0, 400))
def test_a_map_that_is_built_at_once_equals_one_that_has_grown(known: dict[str, int], more: int) -> None:
    new = {f"n{number}": number for number in range(more)}
    grown = PersistentMap(known)
    for name, value in new.items():
        grown = grown.with_items({name: value})
    assert PersistentMap(known).with_items(new) == grown
    assert dict(grown) == {**known, **new}
    assert len(PersistentMap(known).with_items(new)) == len(grown)


def test_a_round_goes_on_after_a_tick() -> None:
    context = context_of(clients_per_round=2)
    state, _ = step(context, begin(context), Surveyed(survey=survey_of(context, NAMES)), 1.0)
    after, _ = step(context, state, Tick(), 2.0)
    assert (after.phase, len(after.clients), len(after.live.members)) == ("train", 2, len(NAMES))
