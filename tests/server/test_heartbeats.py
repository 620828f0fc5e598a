"""A heartbeat changes only its sender's state, in a fleet of any size."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import PLAN_DEADLINES, context_of, join_client, profile, run_with_members, telemetry

from subfleet.protocol.messages import Presence, Profile
from subfleet.rounds import coordinator
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import FleetMember, LiveState
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.progress import Waiting
from subfleet.rounds.signals import Tick
from subfleet.rounds.state import RunState

keys = st.text(max_size=3)


@pytest.mark.slow
@given(st.dictionaries(keys, st.integers()), st.lists(st.dictionaries(keys, st.integers(), max_size=5)), st.sets(keys))
def test_a_persistent_map_is_the_mapping_that_it_stands_for(
    first: dict[str, int], changes: list[dict[str, int]], removed: set[str]
) -> None:
    persistent, known = PersistentMap(first), dict(first)
    for change in changes:
        before, known_before = persistent, dict(known)
        persistent, known = persistent.with_items(change), {**known, **change}
        assert before == known_before, "nothing changes an existing map"
        assert set(persistent.find_changed(before)) == {
            key for key in known if key not in known_before or known[key] is not known_before[key]
        }
    assert dict(persistent) == known
    assert len(persistent) == len(known)
    assert (persistent == PersistentMap(first)) == (known == first)
    remaining = {key: value for key, value in known.items() if key not in removed}
    assert persistent.without(removed) == remaining
    assert persistent.without(removed) == PersistentMap(remaining)
    assert len(persistent.without(removed)) == len(remaining)
    assert set(persistent.find_changed(persistent.without(removed))) == set(known) - set(remaining)
    assert list(persistent.items()) == [(key, persistent[key]) for key in persistent]
    assert persistent.items() == known.items()
    assert list(PersistentMap(known)) == list(PersistentMap(dict(reversed(known.items()))))


def fleet_of(context: RunContext, count: int) -> RunState:
    names = [f"client{number}" for number in range(count)]
    members = {name: FleetMember(session_id=f"{name}-1", heard_s=1.0, noted_s=1.0) for name in names}
    state = replace(run_with_members(*map(profile, names)), live=LiveState(members=PersistentMap(members)))
    return step(context, state, Tick(), 2.0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 3000])
@pytest.mark.parametrize("phase", ["waiting", "measure"])
def test_a_heartbeat_shares_all_other_members_and_looks_at_none(
    count: int, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(min_clients=1 if phase == "measure" else count + 1, deadlines=PLAN_DEADLINES)
    state = fleet_of(context, count)
    assert state.phase == phase
    monkeypatch.setattr(coordinator, "advance", lambda *_: pytest.fail("the whole fleet was looked at"))
    heard = Presence(client_id="client7", session_id="client7-1", online=True)
    regular = replace(telemetry(context, "client7"), run_id=None, round=None)
    for event in (heard, regular, replace(state.profiles["client7"])):
        after, actions = step(context, state, event, 3.0)
        assert actions == ()
        assert list(after.live.members.find_changed(state.live.members)) == (
            [] if isinstance(event, Profile) else ["client7"]
        )
        own = [
            branch
            for branch, old in zip(after.live.members.root, state.live.members.root, strict=True)
            if branch is not old
        ]
        assert len(own) <= 1
        assert (
            sum(
                leaf is not old
                for branch in own
                for leaf, old in zip(branch, _find_old_branch(state, after), strict=True)
            )
            <= 1
        )
        assert after.clients is state.clients


def _find_old_branch(state: RunState, after: RunState) -> tuple[object, ...]:
    pairs = zip(after.live.members.root, state.live.members.root, strict=True)
    return next(old for branch, old in pairs if branch is not old)


def test_a_message_that_advances_the_run_advances_it_at_once() -> None:
    """A client that returns, restarts, is heard again after its lease, or says goodbye."""
    context = context_of(min_clients=3, deadlines=PLAN_DEADLINES)
    state = fleet_of(context, 2)
    arrival = Presence(client_id="new", session_id="new-1", online=True)
    state, _ = step(context, state, arrival, 3.0)
    assert step(context, state, profile("new"), 3.0)[0].phase == "measure"
    state = fleet_of(context, 3)
    assert state.phase == "measure"
    lapsed = replace(state, at=Waiting(), round=0)
    late_s = 1.0 + PLAN_DEADLINES.lease_s + 1
    for number in range(3):
        assert lapsed.phase == "waiting"
        name = f"client{number}"
        heartbeat = Presence(client_id=name, session_id=f"{name}-1", online=True)
        lapsed, _ = step(context, lapsed, heartbeat, late_s)
    assert lapsed.phase == "measure"


def test_a_profile_that_comes_again_changes_nothing() -> None:
    context = context_of()
    state = join_client(context, RunState(), "ada", 1.0)
    known = state.profiles["ada"]
    again, _ = step(context, state, replace(known), 2.0)
    assert again is state
    changed, _ = step(context, state, replace(known, sample_count=99), 2.0)
    assert changed.profiles["ada"] != known
