"""The journal of runs: what a server needs to take a run up, and what people ask.

The state of the run is stored as it is, see `stored_state`. All other tables are projections of it for whoever reads:
facts that people query as columns, and whole records as canonical JSON, read back as any message is.
"""

import datetime
import json
import uuid
from collections.abc import Callable
from typing import Any

import sqlalchemy as sql

from subfleet.journal.database import evaluations, generations, rounds, runs, state, tasks, updates
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.generations import GenerationRecord
from subfleet.journal.reading import connected, place_of, typed_rows, typed_scalars, understood
from subfleet.journal.records import RoundRecord
from subfleet.journal.stored_state import Change, state_changes, state_of
from subfleet.protocol.messages import Profile
from subfleet.protocol.schema import canonical_json, from_plain
from subfleet.rounds.actions import Close, CloseEvaluation, CloseGeneration
from subfleet.rounds.state import ClientState, RunState
from subfleet.settings.fingerprint import check_resumable

__all__ = ["Journal", "begin_run"]

Bytes = tuple[int, int]
"""Bytes down and up."""
AnyRecord = RoundRecord | EvaluationRecord | GenerationRecord


def begin_run(engine: sql.Engine, *, name: str, settings: str, round_count: int) -> str:
    """Find the run of that name, or make it; returns its id.

    Args:
        engine: of the database.
        name: of the run.
        settings: everything that takes part in its outcome, as canonical JSON; see `Run.fingerprint`.
        round_count: how many rounds it has.

    Raises:
        ConfigError: the run was begun with another configuration; it may have more rounds now.
        FileError: the database cannot be written, or is damaged.
    """
    with understood(place_of(engine)), engine.begin() as connection:
        known = next(typed_rows(connection, sql.select(runs).where(runs.c.name == name)), None)
        if known is None:
            run_id = f"{name}-{uuid.uuid4().hex[:8]}"
            row = {"run_id": run_id, "name": name, "settings": settings, "round_count": round_count}
            start = {"started_at": _now(), **_run_row(RunState())}
            connection.execute(runs.insert().values(**row, **start))
            return run_id
        remedy = "restore that, or choose another name or state folder"
        if check_resumable(f"run {name!r}", json.loads(known.settings), json.loads(settings), remedy):
            more = {"settings": settings, "round_count": round_count}
            connection.execute(runs.update().where(runs.c.run_id == known.run_id).values(**more))
    return str(known.run_id)


class Journal:
    """One run's part of the database: written by the server's one thread, in one transaction for each step.

    Args:
        engine: of the database.
        run_id: whose part it is.
        first_memory: what the run's method begins with, so that what it remembers is read as a record of that kind.
    """

    def __init__(self, engine: sql.Engine, run_id: str, *, first_memory: Any = None) -> None:
        self._engine = engine
        self._run_id = run_id
        self._first_memory = first_memory

    def load(self, now_s: float) -> RunState:
        """The stored state of the run, with its clients not heard of yet and its deadlines started anew.

        Raises:
            FileError: the database is damaged, or holds what this version cannot read.
        """
        rows = sql.select(state.c.part, state.c.key, state.c.value).where(state.c.run_id == self._run_id)
        with connected(self._engine) as connection:
            (_,) = typed_scalars(connection, sql.select(runs.c.run_id).where(runs.c.run_id == self._run_id))
            found = typed_rows(connection, rows.order_by(state.c.part, state.c.key))
            return state_of(map(tuple, found), type(self._first_memory)).restarted(now_s)

    def profiles(self) -> tuple[Profile, ...]:
        """What the clients of the run have declared, in the order of their ids."""
        mine = sql.and_(state.c.run_id == self._run_id, state.c.part == "profiles")
        with connected(self._engine) as connection:
            texts = typed_scalars(connection, sql.select(state.c.value).where(mine).order_by(state.c.key))
            return tuple(from_plain(Profile, json.loads(text)) for text in texts)

    def load_bytes(self, at: RunState) -> dict[str, Bytes]:
        """Bytes counted so far for each client state of the open round."""
        query = sql.select(tasks).where(
            tasks.c.run_id == self._run_id, tasks.c.round == at.round, tasks.c.work == _work_of(at.phase)
        )
        with connected(self._engine) as connection:
            return {row.client_id: (row.bytes_down, row.bytes_up) for row in typed_rows(connection, query)}

    def save(
        self,
        before: RunState,
        after: RunState,
        *,
        counted: Callable[[str], Bytes] = lambda client_id: (0, 0),
        close: Close | CloseEvaluation | CloseGeneration | None = None,
        record: AnyRecord | None = None,
    ) -> None:
        """Write what a step changed, and the record of a round that it closed, in one transaction.

        Args:
            before: the state before the step.
            after: the state after it.
            counted: bytes of a client in this round.
            close: the closed round, with its final client states and its checkpoint's digest; or a closed evaluation,
                or a generation.
            record: of the same.

        Raises:
            FileError: the database cannot be written.
        """
        changes = [*state_changes(before, after)]
        if not (changes or record):
            return
        row = _run_row(after)
        # Scores of a generation are told in its own record.
        clients = () if after.clients is before.clients or after.phase == "search" else after.clients.items()
        changed = [client for name, client in clients if client is not before.clients.get(name)]
        same = after.round == before.round > after.aggregated_round
        emptied = same and not before.clients.keys() <= after.clients.keys()
        with self._engine.begin() as connection:
            if row != _run_row(before):
                connection.execute(runs.update().where(runs.c.run_id == self._run_id).values(**row))
            self._save_state(connection, changes)
            if emptied:  # the round is tried again, and who answered before is not waiting in it
                for table in (tasks, updates):
                    of_round = sql.and_(table.c.run_id == self._run_id, table.c.round == after.round)
                    connection.execute(table.delete().where(of_round))
            if record is not None and close is not None:
                self._save_close(connection, close, record, counted)
            for client in changed:
                self._save_client(connection, after.round, _work_of(after.phase), client, counted(client.client_id))

    def records(self, *, newest: int | None = None) -> tuple[RoundRecord, ...]:
        """The finished rounds, in order: all of them, or the newest few."""
        query = sql.select(rounds.c.record).where(rounds.c.run_id == self._run_id)
        query = query.order_by(rounds.c.round.desc()).limit(newest)
        with connected(self._engine) as connection:
            texts = reversed([*typed_scalars(connection, query)])
            return tuple(from_plain(RoundRecord, _with_metrics(json.loads(text))) for text in texts)

    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        """What devices found after rounds, in order."""
        query = sql.select(evaluations.c.record).where(evaluations.c.run_id == self._run_id)
        with connected(self._engine) as connection:
            texts = typed_scalars(connection, query.order_by(evaluations.c.round))
            return tuple(from_plain(EvaluationRecord, json.loads(text)) for text in texts)

    def generations(self) -> tuple[GenerationRecord, ...]:
        """What searches between rounds have come to, in order."""
        query = sql.select(generations.c.record).where(generations.c.run_id == self._run_id)
        with connected(self._engine) as connection:
            texts = typed_scalars(connection, query.order_by(generations.c.round, generations.c.number))
            return tuple(from_plain(GenerationRecord, json.loads(text)) for text in texts)

    def checkpoint_sha256(self, round_number: int) -> str | None:
        """Digest of a round's checkpoint."""
        query = sql.select(rounds.c.checkpoint_sha256).where(
            rounds.c.run_id == self._run_id, rounds.c.round == round_number
        )
        with connected(self._engine) as connection:
            return next(typed_scalars(connection, query), None)

    def update_digests(self, *, since_round: int) -> set[str]:
        """Digests of the accepted updates of a round and those after it."""
        query = sql.select(updates.c.sha256).where(updates.c.run_id == self._run_id, updates.c.round >= since_round)
        with connected(self._engine) as connection:
            return set(typed_scalars(connection, query))

    def _save_state(self, connection: sql.Connection, changes: list[Change]) -> None:
        keys = [{"of_run": self._run_id, "of_part": one.part, "of_key": one.key} for one in changes]
        named = {state.c.run_id: "of_run", state.c.part: "of_part", state.c.key: "of_key"}
        same = sql.and_(*(column == sql.bindparam(name) for column, name in named.items()))
        rows = [
            {"run_id": self._run_id, "part": one.part, "key": one.key, "value": one.text}
            for one in changes
            if one.text is not None
        ]
        if keys:
            connection.execute(state.delete().where(same), keys)
        if rows:
            connection.execute(state.insert(), rows)

    def _save_close(
        self,
        connection: sql.Connection,
        close: Close | CloseEvaluation | CloseGeneration,
        record: AnyRecord,
        counted: Callable[[str], Bytes],
    ) -> None:
        if isinstance(record, GenerationRecord):
            row = {"run_id": self._run_id, "round": record.round, "number": record.number}
            _put(connection, generations, {**row, "record": canonical_json(record).decode()})
        if isinstance(close, CloseGeneration) or isinstance(record, GenerationRecord):
            return
        if isinstance(record, EvaluationRecord):
            row = {"run_id": self._run_id, "round": record.round, "record": canonical_json(record).decode()}
            _put(connection, evaluations, row)
        elif isinstance(close, Close):
            self._save_record(connection, record, close.sha256)
        work = "train" if isinstance(close, Close) else "evaluate"
        for client in close.clients:
            self._save_client(connection, close.round, work, client, counted(client.client_id))

    def _save_record(self, connection: sql.Connection, record: RoundRecord, sha256: str) -> None:
        names = ("round", "accuracy", "loss", "seconds", "log_time_s")
        row = {name: getattr(record, name) for name in names}
        text = canonical_json(record).decode()
        _put(connection, rounds, {"run_id": self._run_id, **row, "checkpoint_sha256": sha256, "record": text})

    def _save_client(
        self, connection: sql.Connection, round_number: int, work: str, client: ClientState, counted: Bytes
    ) -> None:
        down, up = counted
        key = {"run_id": self._run_id, "round": round_number, "client_id": client.client_id}
        row = {
            "stage": client.stage,
            "reason": client.reason,
            "architecture": client.task.architecture.name if client.task is not None else "",
            "bytes_down": down,
            "bytes_up": up,
        }
        _put(connection, tasks, {**key, "work": work, **row})
        if work == "train" and client.update is not None:
            blob, result = client.update.blob, client.update
            facts = {"sha256": blob.sha256, "size_bytes": blob.size_bytes, "sample_count": result.sample_count}
            _put(connection, updates, {**key, "task_id": result.task_id, **facts, "received_at": _now()})


def _with_metrics(plain: dict[str, Any]) -> dict[str, Any]:
    """A round's record; those of before metrics came may tell a perplexity in their place."""
    metrics = {} if (told := plain.pop("perplexity", None)) is None else {"perplexity": told}
    return {"metrics": metrics, "headline": next(iter(metrics), "accuracy"), **plain}


def _put(connection: sql.Connection, table: sql.Table, row: dict[str, Any]) -> None:
    """Insert a row or replace the one with its key, in words that every database understands."""
    keys = [column.name for column in table.primary_key]
    same = sql.and_(*(table.c[name] == row[name] for name in keys))
    values = {name: value for name, value in row.items() if name not in keys}
    if connection.execute(table.update().where(same).values(**values)).rowcount == 0:
        connection.execute(table.insert().values(**row))


def _run_row(at: RunState) -> dict[str, Any]:
    """What of a state is a column of its run."""
    own = {"phase": at.phase, "round": at.round, "aggregated_round": at.aggregated_round, "failure": at.failure}
    return {**own, "retry": at.retry, "lost": at.tries.lost, "waits_for": at.tries.waits_for}


def _work_of(phase: str) -> str:
    """What the client states of a phase are for."""
    if phase == "evaluate":
        return "evaluate"
    return "deploy" if phase in ("deploy", "finished") else "train"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
