"""The journal loads what was saved."""

import sqlite3
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import CLIENTS, context_of, training, update

from subfleet.journal import stored_state
from subfleet.journal.database import DATABASE_NAME, open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.journal.rows import build_round_record
from subfleet.link.traffic import Traffic
from subfleet.methods.pyramidfl import PyramidFL
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.schema import from_plain
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import FleetMember, LiveState
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.progress import Aggregating, FailedAttempts, Waiting
from subfleet.rounds.signals import AggregationRequest, RequestDone
from subfleet.rounds.state import ClientState, RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest

PLAN = context_of()


def _journal(folder: Path) -> Journal:
    engine = open_database(folder)
    return Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2))


def _durable_state(state: RunState, now_s: float) -> RunState:
    """The part of a state that survives its server."""
    members = {name: FleetMember(noted_s=now_s) for name in state.live.members}
    return replace(state, live=LiveState(members=PersistentMap(members), entered_s=now_s, opened_s=now_s))


@pytest.mark.slow
def test_a_state_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    before = journal.load(0.0)
    assert before == RunState()
    state = training(PLAN)
    journal.save(before, state)
    assert _journal(tmp_path).load(9.0) == _durable_state(state, 9.0)
    after, _ = step(
        PLAN, state, RequestDone(request=CheckRequest(update=update(PLAN, state, "ada")), result=ChangeSize()), 3.0
    )
    journal.save(state, after, counted=lambda name: (10, 20) if name == "ada" else (0, 0))
    assert _journal(tmp_path).load(9.0) == _durable_state(after, 9.0)
    assert _journal(tmp_path).load_bytes(after) == {"ada": (10, 20), "bob": (0, 0), "cyd": (0, 0)}
    assert journal.update_digests(since_round=1) == {update(PLAN, state, "ada").blob.sha256}


def test_another_attempt_forgets_the_bytes_of_all_but_those_that_go_on_with_their_tasks(tmp_path: Path) -> None:
    journal, state = _journal(tmp_path), training(PLAN)
    journal.save(RunState(), state, counted=lambda _: (10, 20))
    undrawn = replace(state, idle={"not drawn": {"bob": "", "cyd": ""}}, clients={"ada": state.clients["ada"]})
    journal.save(state, undrawn)
    assert journal.load_bytes(undrawn).keys() == {"ada", "bob", "cyd"}, "those that are idle have answered"
    again = replace(state, clients={"ada": state.clients["ada"]}, failed_attempts=FailedAttempts(count=1, lost=1))
    journal.save(state, again, counted=lambda _: (30, 40))
    assert journal.load_bytes(again) == {"ada": (30, 40)}


def test_a_closed_round_is_loaded_with_its_record(tmp_path: Path) -> None:
    journal, state = _journal(tmp_path), training(PLAN)
    journal.save(RunState(), state)
    for name in CLIENTS:
        after, _ = step(
            PLAN, state, RequestDone(request=CheckRequest(update=update(PLAN, state, name)), result=ChangeSize()), 3.0
        )
        journal.save(state, after)
        state = after
    event = RequestDone(
        request=AggregationRequest(round=1, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="a" * 64, refused={"bob": "too large"}),
    )
    after, actions = step(PLAN, state, event, 4.0)
    close = actions[0]
    record = build_round_record(PLAN, close, Traffic())  # type: ignore[arg-type]  # the first action closes the round
    journal.save(state, after, close=close, record=record)  # type: ignore[arg-type]
    loaded = _journal(tmp_path).load(9.0)
    assert loaded == _durable_state(after, 9.0)
    assert set(loaded.last) == {"ada", "cyd"}
    assert journal.records() == (record,)
    assert [row.status for row in record.clients] == ["aggregated", "refused: too large", "aggregated"]
    assert journal.checkpoint_sha256(1) == "a" * 64
    assert journal.checkpoint_sha256(2) is None


def test_the_memory_of_a_method_is_saved_in_its_step(tmp_path: Path) -> None:
    first = PyramidFL().roles().memory.initial
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2), first_memory=first)
    assert journal.load(0.0).memory is None, "nothing was added to the initial memory"
    state = training(PLAN)
    memory = replace(first, passes={"ada": 1.0 / 3}, left_out={"bob": 0.1}, oort=replace(first.oort, utilities=(0.1,)))
    journal.save(RunState(), replace(state, memory=memory))
    assert journal.load(9.0) == _durable_state(replace(state, memory=memory), 9.0)


def test_a_step_that_changes_nothing_durable_writes_nothing(tmp_path: Path) -> None:
    journal, state = _journal(tmp_path), training(PLAN)
    journal.save(RunState(), state)
    log = tmp_path / f"{DATABASE_NAME}-wal"
    size = log.stat().st_size
    heard = replace(
        state,
        live=replace(state.live, members=PersistentMap({**state.live.members}), entered_s=77.0),
    )
    journal.save(state, heard)
    assert log.stat().st_size == size


def test_every_commit_is_on_disk(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_names_find_their_run_again(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    first = begin_run(engine, name="one", settings="{}", round_count=2)
    assert begin_run(engine, name="one", settings="{}", round_count=2) == first
    assert begin_run(engine, name="two", settings="{}", round_count=2) != first
    with pytest.raises(ConfigError, match="changed since it was started: seed from unset to 1; restore the settings"):
        begin_run(engine, name="one", settings='{"seed":1}', round_count=2)


def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(b"not a database, but long enough to look at" * 40)
    with pytest.raises(FileError, match=r"file is not a database; move that file away"):
        open_database(tmp_path)


@pytest.mark.parametrize(
    ("change", "column"),
    [
        *[(f"ALTER TABLE runs DROP COLUMN {name}", name) for name in ("attempt", "lost", "waits_for")],
        ("ALTER TABLE runs ADD COLUMN plans TEXT", "plans"),
        ("ALTER TABLE records ADD COLUMN energy_j REAL", "energy_j"),
    ],
)
def test_a_journal_of_another_release_is_one_sentence_and_left_as_it_is(
    tmp_path: Path, change: str, column: str
) -> None:
    journal = _journal(tmp_path)
    journal.save(RunState(), training(PLAN))
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        connection.execute(change)
        before = list(connection.iterdump())
    with pytest.raises(FileError, match=f"another release: .*'{column}'.*choose another state folder") as raised:
        open_database(tmp_path)
    assert raised.value.exit_code == ExitCode.FILE
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        assert list(connection.iterdump()) == before


def test_a_database_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="one", settings="{}", round_count=2))
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE runs")
    with pytest.raises(FileError, match=r"the journal in .* cannot be used: no such table: runs; free some space"):
        journal.save(RunState(), RunState(round=1))
    engine.dispose()


@pytest.mark.slow
def test_a_long_run_is_resumed_from_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = _journal(tmp_path)
    after = start = training(PLAN)
    last: dict[str, ClientState] = {}
    for number in range(1, 31):
        # The last client took part in the first rounds alone.
        names = CLIENTS if number <= 5 else CLIENTS[:-1]
        clients = {name: replace(start.clients[name], stage="done", attempt=number) for name in names}
        before = replace(
            after, round=number, aggregated_round=number - 1, at=Aggregating(), clients=MappingProxyType(clients)
        )
        journal.save(after, before)
        last |= clients
        known = MappingProxyType({**last})
        after = replace(before, at=Waiting(), aggregated_round=number, last=known, clients=MappingProxyType({}))
        journal.save(before, after)
    read: list[object] = []

    def count_reads(kind: type[Any], plain: Any, where: str) -> Any:
        read.append(kind)
        return from_plain(kind, plain, where)

    monkeypatch.setattr(stored_state, "from_plain", count_reads)
    loaded = journal.load(0.0)
    assert {name: client.attempt for name, client in loaded.last.items()} == dict(
        zip(CLIENTS, (30, 30, 5), strict=True)
    )
    assert read.count(ClientState) == len(CLIENTS)
