"""Devices that leave: the reason is reported, and no round waits for a device that has said goodbye."""

from dataclasses import replace
from pathlib import Path

import pytest
from server.coordinator_cases import context_of, join_client, profile, training
from server.server_rig import World, config, fleet

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import Presence, decode, encode
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import FleetMember
from subfleet.rounds.members import list_expected
from subfleet.rounds.progress import Finished
from subfleet.rounds.signals import Tick, Withdraw
from subfleet.rounds.state import RunState
from subfleet.serving.attendance import Attendance, list_absences
from subfleet.serving.narration import Pace
from subfleet.settings.sections import Deadlines

DEADLINES = Deadlines(lease_s=30.0, round_s=600.0)
STRICT = context_of(deadlines=DEADLINES)
LOOSE = context_of(deadlines=DEADLINES, quorum=0.9)
WHY = "it said goodbye (it was stopped)"


def presence(name: str, *, online: bool = False, reason: str = "", session: str = "1") -> Presence:
    return Presence(client_id=name, session_id=f"{name}-{session}", online=online, reason=reason)


def goodbye(name: str) -> Presence:
    return presence(name, reason="it was stopped")


def list_stages(state: RunState) -> dict[str, tuple[str, str]]:
    return {name: (client.stage, client.reason) for name, client in state.clients.items()}


def begin_round(context: RunContext) -> tuple[RunState, float]:
    state = training(context)
    return state, max(member.heard_s or 0.0 for member in state.live.members.values())


def test_a_goodbye_ends_the_wait_at_once_where_a_round_closes_at_a_quorum() -> None:
    state, now_s = begin_round(LOOSE)
    before = state.clients["ada"]
    state, actions = step(LOOSE, state, goodbye("ada"), now_s + 1)
    assert list_stages(state)["ada"] == ("missing", WHY)
    assert before.task is None or Withdraw(task_id=before.task.task_id) in actions
    assert {client.stage for name, client in state.clients.items() if name != "ada"} == {before.stage}


def test_in_a_strict_run_a_device_that_said_goodbye_has_a_lease_to_come_back() -> None:
    state, now_s = begin_round(STRICT)
    stage = state.clients["ada"].stage
    state, _ = step(STRICT, state, goodbye("ada"), now_s + 1)
    state, _ = step(STRICT, state, Tick(), now_s + 30.9)
    assert list_stages(state)["ada"] == (stage, "")
    assert "ada" in list_expected(STRICT, state, now_s + 30.9)
    back, _ = step(STRICT, state, presence("ada", online=True, session="2"), now_s + 30.9)
    assert list_stages(step(STRICT, back, Tick(), now_s + 60)[0])["ada"] == (stage, "")
    absent, _ = step(STRICT, state, Tick(), now_s + 31)
    assert list_stages(absent)["ada"] == ("missing", WHY)
    assert "ada" not in list_expected(STRICT, absent, now_s + 31)


@pytest.mark.parametrize("context", [STRICT, LOOSE])
def test_a_will_is_only_a_hint_and_ends_no_wait_before_the_deadline(context: RunContext) -> None:
    state, now_s = begin_round(context)
    stage = state.clients["ada"].stage
    state, _ = step(context, state, presence("ada"), now_s + 1)
    state, _ = step(context, state, Tick(), now_s + 500)
    assert list_stages(state)["ada"] == (stage, "")
    state, _ = step(context, state, Tick(), state.live.entered_s + 600)
    assert {name: reason for name, (_, reason) in list_stages(state).items() if name in ("ada", "bob")} == {
        "ada": "no answer came in time: the broker reported a broken connection (its will)",
        "bob": f"no answer came in time: no heartbeat for {state.live.entered_s - now_s:.0f} s",
    }


def test_a_will_that_follows_a_goodbye_is_still_a_goodbye() -> None:
    state, now_s = begin_round(STRICT)
    for message in (goodbye("ada"), presence("ada")):
        state, _ = step(STRICT, state, message, now_s + 1)
    assert [absence.reason for absence in list_absences(STRICT, state, now_s + 1, 100.0)] == [WHY]
    state, _ = step(STRICT, state, presence("ada", online=True), now_s + 2)
    assert list(list_absences(STRICT, state, now_s + 2, 100.0)) == []


def test_each_absence_has_its_reason() -> None:
    state, now_s = begin_round(STRICT)
    state, _ = step(STRICT, state, goodbye("ada"), now_s + 5)
    state, _ = step(STRICT, state, presence("bob"), now_s + 6)
    live = replace(
        state.live,
        members=state.live.members.with_items({"eve": FleetMember(), "stranger": FleetMember(session_id="s")}),
    )
    last = {"eve": replace(state.clients["ada"], client_id="eve")}
    state = replace(state, profiles=state.profiles.with_items({"eve": profile("eve")}), live=live, last=last)
    assert {
        absence.client_id: (absence.kind, absence.reason, absence.seen_at)
        for absence in list_absences(STRICT, state, now_s + 41, 100.0)
    } == {
        "ada": ("goodbye", WHY, 100.0 - 36),
        "bob": ("will", "the broker reported a broken connection (its will)", 100.0 - 35),
        "cyd": ("silent", "no heartbeat for 41 s", 100.0 - 41),
        "eve": ("unheard", "it has not been heard since the server started", None),
    }
    refused = replace(state.clients["cyd"], stage="refused", reason="memory: 3 bytes are free")
    state = replace(state, clients={**state.clients, "cyd": refused})
    state, _ = step(STRICT, state, presence("cyd", online=True), now_s + 41)
    assert [
        absence.reason for absence in list_absences(STRICT, state, now_s + 41, 100.0) if absence.client_id == "cyd"
    ] == ["refused: memory: 3 bytes are free"]


def test_departures_and_returns_are_reported_once_and_journaled(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    run_id = begin_run(engine, name="test", settings="{}", round_count=2)
    context = replace(STRICT, run_id=run_id)
    journal = Journal(engine, run_id)
    attendance, pace = Attendance(context, journal), Pace(3, lambda: 0.0)
    state, now_s = begin_round(context)
    journal.save(RunState(), RunState(profiles=state.profiles))
    assert list(attendance.check(state, now_s)) == []
    state, _ = step(context, state, goodbye("ada"), now_s + 0.5)
    assert list(attendance.check(state, now_s + 0.9)) == [], "it was away for less than a second"
    assert list(attendance.check(state, now_s + 1.0)) == [f"client ada is away: {WHY}"]
    assert list(attendance.check(state, now_s + 3.0)) == []
    (absence,) = journal.absences().values()
    assert (absence.client_id, absence.kind, absence.reason) == ("ada", "goodbye", WHY)
    assert absence.seen_at is not None
    assert attendance.list_awaited(state) == (f"ada: {WHY}, last seen 2 s ago",)
    progress = pace.progress(state, attendance.list_awaited(state))
    assert progress is not None
    assert progress.away == (f"ada: {WHY}, last seen 2 s ago",)
    state, _ = step(context, state, presence("ada", online=True, session="2"), now_s + 4)
    assert list(attendance.check(state, now_s + 4)) == ["client ada is back"]
    assert (journal.absences(), attendance.list_awaited(state)) == ({}, ())
    assert list(attendance.check(state, now_s + 36))[-1] == "client cyd is away: no heartbeat for 36 s"
    engine.dispose()


def test_a_client_that_falls_silent_unheard_is_noticed_at_the_end_of_its_lease(tmp_path: Path) -> None:
    """Only clients that were heard of are looked at each second; silence is no message."""
    engine = open_database(tmp_path)
    run_id = begin_run(engine, name="test", settings="{}", round_count=2)
    context, (state, now_s) = replace(STRICT, run_id=run_id), begin_round(STRICT)
    attendance = Attendance(context, Journal(engine, run_id))
    lease_s = context.config.deadlines.lease_s
    state, _ = step(context, state, presence("bob", online=True), now_s + lease_s)
    assert list(attendance.check(state, now_s + lease_s)) == []
    names = sorted(set(state.live.members) - {"bob"})
    away = f"is away: no heartbeat for {lease_s + 1:.0f} s"
    assert list(attendance.check(state, now_s + lease_s + 1)) == [f"client {name} {away}" for name in names]
    later_s = now_s + 2 * lease_s + 1
    assert list(attendance.check(state, later_s)) == [f"client bob {away}"]
    engine.dispose()


@pytest.mark.slow
def test_a_server_reports_a_goodbye_and_goes_on_without_the_device(tmp_path: Path) -> None:
    deadlines = Deadlines(lease_s=5.0, measure_s=1e4, round_s=1e4, linger_s=0.0)
    world = World(tmp_path, config(rounds=1, deploy_targets=(), deadlines=deadlines), fleet())
    world.run(lambda: world.server.state.phase == "train")
    departed = world.devices.pop("cyd")
    departed.send(Presence(client_id="cyd", session_id=departed.session_id, online=False, reason="it was stopped"))
    world.run(turns=100)
    assert f"client cyd is away: {WHY}" in world.notes.messages
    assert {row.client_id: row.status for row in world.server.result().rounds[0].clients} == {
        "ada": "aggregated",
        "bob": "aggregated",
        "cyd": f"missing: {WHY}",
    }


def test_departures_after_the_end_of_a_run_are_not_reported(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    run_id = begin_run(engine, name="test", settings="{}", round_count=2)
    context = replace(STRICT, run_id=run_id)
    state = join_client(context, RunState(), "eve", 1.0)
    state, _ = step(context, replace(state, at=Finished()), presence("eve", reason="the run is finished"), 2.0)
    assert list(Attendance(context, Journal(engine, run_id)).check(state, 3.0)) == []
    assert [absence.reason for absence in Journal(engine, run_id).absences().values()] == [
        "it said goodbye (the run is finished)"
    ]
    engine.dispose()


def test_only_a_goodbye_encodes_a_reason_so_that_older_servers_read_the_rest() -> None:
    for message in (presence("ada", online=True), presence("ada")):
        assert b"reason" not in encode(message)
        assert decode(encode(message)) == message
    farewell = replace(goodbye("ada"), message_id="m")
    assert encode(farewell) == (
        b'{"client_id":"ada","kind":"presence","message_id":"m","online":false,"reason":"it was stopped","schema":3,'
        b'"session_id":"ada-1"}'
    )
    assert decode(encode(farewell)) == farewell
    with pytest.raises(ProtocolError, match="reason has 129 characters"):
        decode(encode(goodbye("ada")).replace(b"it was stopped", b"x" * 129))
