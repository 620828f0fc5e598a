"""Which members the server remembers, and for how long."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from server.coordinator_cases import CLIENTS, context_of, join_client, profile, run_with_members, training
from server.server_rig import World, config, fleet

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.protocol.messages import Presence, encode
from subfleet.rounds import members
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import FleetMember, LiveState
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.progress import Waiting
from subfleet.rounds.signals import Tick
from subfleet.rounds.state import RunState
from subfleet.settings.sections import Deadlines

PLAN = context_of(deadlines=Deadlines(lease_s=30.0, forget_s=100.0))


def test_a_silent_client_that_never_took_part_is_forgotten() -> None:
    state = join_client(PLAN, RunState(), "eve", 1.0)
    ghost = Presence(client_id="ghost", session_id="s", online=True)
    state, _ = step(PLAN, state, ghost, 1.0)
    state, _ = step(PLAN, state, Tick(), 31.0)
    assert set(state.live.members) == {"eve", "ghost"}
    state, _ = step(PLAN, state, Tick(), 31.1)  # it never sent a profile
    assert set(state.live.members) == {"eve"}
    goodbye = Presence(client_id="eve", session_id="eve-1", online=False)
    state, _ = step(PLAN, state, goodbye, 50.0)
    assert set(step(PLAN, state, Tick(), 150.0)[0].live.members) == {"eve"}
    assert step(PLAN, state, Tick(), 150.1)[0].live.members == {}


def test_clients_that_are_heard_or_have_a_task_or_took_part_stay() -> None:
    state = training(PLAN)
    assigned, _ = step(PLAN, state, Tick(), 500.0)
    assert set(assigned.live.members) == set(CLIENTS)
    later = replace(state, clients=MappingProxyType({}), last=MappingProxyType({"ada": state.clients["ada"]}))
    later = replace(later, at=Waiting(), round=0)
    later, _ = step(PLAN, later, Presence(client_id="bob", session_id="bob-1", online=True), 490.0)
    later, _ = step(PLAN, later, Tick(), 500.0)
    assert set(later.live.members) == {"ada", "bob"}


def test_beyond_the_limit_the_longest_silent_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MOST_STRANGERS", 3)
    context = context_of(min_clients=100, deadlines=Deadlines(forget_s=1e6))
    state = RunState()
    for number in range(50):
        state = join_client(context, state, f"eve-{number}", float(number))
        state, _ = step(context, state, Tick(), float(number))
        assert len(state.live.members) <= 3
    assert set(state.live.members) == {"eve-47", "eve-48", "eve-49"}


def test_large_profiles_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MOST_VALUES", 1000)
    large = [replace(profile(f"eve-{number}"), class_counts=(1,) * 300) for number in range(9)]
    heard = {declared.client_id: FleetMember(noted_s=number) for number, declared in enumerate(large)}
    state = replace(run_with_members(*large), live=LiveState(members=PersistentMap(heard)))
    state, _ = step(context_of(), state, Tick(), 9.0)
    assert set(state.live.members) == {"eve-6", "eve-7", "eve-8"}


def test_the_journal_forgets_them_too(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2))
    known = join_client(PLAN, join_client(PLAN, RunState(), "eve", 1.0), "bob", 90.0)
    journal.save(RunState(), known)
    assert {name: member.noted_s for name, member in journal.load(7.0).live.members.items()} == {"bob": 7.0, "eve": 7.0}
    after, _ = step(PLAN, known, Tick(), 102.0)
    journal.save(known, after)
    assert set(journal.load(7.0).live.members) == {"bob"} == set(after.live.members)


@pytest.mark.slow
def test_one_bad_sender_costs_one_line_a_minute_and_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MOST_STRANGERS", 50)
    world = World(tmp_path, config(rounds=1, deploy_targets=()), fleet())
    eve = world.broker.client("eve")
    eve.open(())
    long_name = {**json.loads(encode(profile("eve"))), "device": "x" * 4000}
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            for _ in range(20):
                eve.publish("subfleet/1/main/up/eve/profile", json.dumps(long_name).encode())
                eve.publish("subfleet/1/main/up/eve/none", b"nonsense")
            stranger = Presence(client_id=f"e{number}", session_id="s", online=True)
            eve.publish(f"subfleet/1/main/up/e{number}/presence", encode(stranger))
            world.server.step(0.0)
            assert len(world.server.state.live.members) <= 51
    lines = [record.getMessage() for record in caplog.records if "eve" in record.getMessage()]
    assert len(lines) == 1
    assert "device has 4000 characters, but must have at most 128" in lines[0]
    world.run()
    assert {row.status for row in world.server.result().rounds[0].clients} == {"aggregated"}


def test_clients_of_the_journal_do_not_count_until_they_are_heard() -> None:
    """The journal names them and a strict run waits for them, but a round needs clients that are online."""
    context = context_of(min_clients=2)
    state, _ = step(context, run_with_members(profile("bob"), profile("cyd")), Tick(), 1.0)
    state = join_client(context, state, "ada", 1.0)
    assert state.phase == "waiting"
    state = join_client(context, state, "bob", 2.0)
    assert (state.phase, sorted(members.list_expected(context, state, 2.0))) == ("measure", ["ada", "bob", "cyd"])
