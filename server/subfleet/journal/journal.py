"""The journal of runs: what a server needs to continue a run, and what people ask for.

The state of the run is stored as it is, see `stored_state`. Beside it stand the records of what happened, each as
canonical JSON under its part: rounds, evaluations and generations, digests of checkpoints and updates, bytes of each
client, and who is away.
"""

import datetime
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sqlalchemy as sql

from subfleet.journal.base import AbsenceRecord, AnyRecord, Bytes
from subfleet.journal.database import (
    connect,
    describe_location,
    open_database,
    read_rows,
    records,
    reporting_damage,
    runs,
    state,
)
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.networks import GenerationRecord
from subfleet.journal.records import RoundRecord
from subfleet.journal.stored_state import Change, build_change, build_state, list_changes
from subfleet.protocol.messages import Profile
from subfleet.protocol.schema import from_plain
from subfleet.rounds.signals import AnyClose, Close
from subfleet.rounds.state import RunState
from subfleet.settings.fingerprint import check_resumable
from subfleet.settings.run import Run

_LAST = chr(0x10FFFF)
"""Behind every other character, so that the index answers which keys begin with a prefix, as it does not LIKE."""
_PARTS: Mapping[type, str] = MappingProxyType(
    {RoundRecord: "round", EvaluationRecord: "evaluation", GenerationRecord: "generation"}
)


def begin_run(engine: sql.Engine, *, name: str, settings: str, round_count: int, run_id: str | None = None) -> str:
    """Find the run of that name, or create it; returns its id.

    Args:
        engine: of the database.
        name: of the run.
        settings: everything that takes part in its outcome, as canonical JSON; see `Run.fingerprint`.
        round_count: how many rounds it has.
        run_id: of a new run; None makes one that no other server has.

    Raises:
        ConfigError: the run was begun with another configuration; it may have more rounds now.
        FileError: the database cannot be written, or is damaged.
    """
    with reporting_damage(describe_location(engine)), engine.begin() as connection:
        known = next(read_rows(connection, sql.select(runs).where(runs.c.name == name)), None)
        if known is None:
            run_id = run_id or f"{name}-{uuid.uuid4().hex[:8]}"
            row = {"run_id": run_id, "name": name, "settings": settings, "round_count": round_count}
            started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
            connection.execute(runs.insert().values(**row, started_at=started_at, **_build_run_row(RunState())))
            return run_id
        remedy = "restore the settings, or choose another name or state folder"
        if check_resumable(f"run {name!r}", json.loads(known.settings), json.loads(settings), remedy):
            more = {"settings": settings, "round_count": round_count}
            connection.execute(runs.update().where(runs.c.run_id == known.run_id).values(**more))
    return str(known.run_id)


def open_journal(folder: Path, config: Run, *, run_id: str | None = None) -> "Journal":
    """Open the journal of a run in a state folder, and begin the run there unless it has begun.

    Args:
        folder: of the state.
        config: the run.
        run_id: as in `begin_run`.

    Raises:
        ConfigError: the run was begun with other settings.
        FileError: the database cannot be used, or is damaged.
    """
    engine = open_database(folder)
    settings, count = config.fingerprint(), config.total_rounds
    known_id = begin_run(engine, name=config.name, settings=settings, round_count=count, run_id=run_id)
    return Journal(engine, known_id, first_memory=config.roles.memory.initial)


class Journal:
    """One run's part of the database: written by the server's one thread, in one transaction for each step.

    Args:
        engine: of the database.
        run_id: of the run.
        first_memory: the method's initial memory, which tells the type that its memory is read as.
    """

    def __init__(self, engine: sql.Engine, run_id: str, *, first_memory: Any = None) -> None:
        self.run_id = run_id
        self._engine = engine
        self._first_memory = first_memory

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    def load(self, now_s: float) -> RunState:
        """The stored state of the run, with no client heard yet and its deadlines started anew.

        Raises:
            FileError: the database is damaged, or holds what this version cannot read.
        """
        rows = sql.select(state.c.part, state.c.key, state.c.value).where(state.c.run_id == self.run_id)
        with connect(self._engine) as connection:
            (_,) = read_rows(connection, sql.select(runs.c.run_id).where(runs.c.run_id == self.run_id))
            stored = read_rows(connection, rows.order_by(state.c.part, state.c.key))
            return build_state(map(tuple, stored), type(self._first_memory)).restart(now_s)

    def profiles(self) -> tuple[Profile, ...]:
        """The profiles of the run's clients, in the order of their ids."""
        return tuple(self._read(state, "profiles", Profile).values())

    def records(self, *, newest: int | None = None) -> tuple[RoundRecord, ...]:
        """The finished rounds, in order: all of them, or the newest few."""
        return tuple(self._read(records, "round", RoundRecord, newest=newest).values())

    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        """The evaluations by devices, in order."""
        return tuple(self._read(records, "evaluation", EvaluationRecord).values())

    def generations(self) -> tuple[GenerationRecord, ...]:
        """The generations of searches between rounds, in order."""
        return tuple(self._read(records, "generation", GenerationRecord).values())

    def checkpoint_sha256(self, round_number: int) -> str | None:
        """Digest of a round's checkpoint."""
        return self._read(records, "checkpoint", str, prefix=_join_key(round_number)).get(_join_key(round_number))

    def update_digests(self, *, since_round: int) -> set[str]:
        """Digests of the accepted updates of a round and those after it."""
        return set(self._read(records, "update", str, since=_join_key(since_round)).values())

    def load_bytes(self, at: RunState) -> dict[str, Bytes]:
        """Bytes counted so far for each client state of the open round."""
        prefix = f"{_join_key(at.round)}/{_name_work(at.phase)}/"
        moved = self._read(records, "traffic", tuple[int, int], prefix=prefix)
        return {key.removeprefix(prefix): value for key, value in moved.items()}

    def absences(self) -> dict[str, AbsenceRecord]:
        """The clients that are away, by id."""
        return self._read(records, "absence", AbsenceRecord)

    def save_absences(self, away: Iterable[AbsenceRecord]) -> None:
        """Replace the clients that are away.

        Raises:
            FileError: the database cannot be written.
        """
        with self._engine.begin() as connection:
            self._delete(connection, "absence", "")
            self._write(connection, records, [build_change("absence", absence.client_id, absence) for absence in away])

    def save(
        self,
        before: RunState,
        after: RunState,
        *,
        counted: Callable[[str], Bytes] = lambda client_id: (0, 0),
        close: AnyClose | None = None,
        record: AnyRecord | None = None,
    ) -> None:
        """Write what a step changed, and the record of what it closed, in one transaction.

        Args:
            before: the state before the step.
            after: the state after it.
            counted: bytes of a client in this round.
            close: the closed round, evaluation or generation.
            record: of the same.

        Raises:
            FileError: the database cannot be written.
        """
        changes = [*list_changes(before, after)]
        if not (changes or record):
            return
        row = _build_run_row(after)
        # The record of a generation has its own counts.
        clients = () if after.clients is before.clients or after.phase == "search" else after.clients.items()
        # Clients that go on from one asynchronous round to the next take their bytes with them.
        next_round = after.run_attempt != before.run_attempt
        changed = [
            client for name, client in clients if client is not before.clients.get(name) or (next_round and client.open)
        ]
        same = after.round == before.round > after.aggregated_round
        emptied = same and _has_lost_clients(before, after)
        round_key, work = _join_key(after.round), _name_work(after.phase)
        written = []
        if record is not None:
            number = (record.number,) if isinstance(record, GenerationRecord) else ()
            written.append(build_change(_PARTS[type(record)], _join_key(record.round, *number), record))
        if isinstance(close, Close):
            written.append(build_change("checkpoint", _join_key(close.round), close.result.sha256))
        for client in changed:
            name = client.client_id
            written.append(build_change("traffic", f"{round_key}/{work}/{name}", counted(name)))
            if work == "train" and client.update is not None:
                written.append(build_change("update", f"{round_key}/{name}", client.update.blob.sha256))
        with self._engine.begin() as connection:
            if row != _build_run_row(before):
                connection.execute(runs.update().where(runs.c.run_id == self.run_id).values(**row))
            self._write(connection, state, changes)
            if emptied:  # the round is attempted again, without clients that answered before
                for part in ("traffic", "update"):
                    self._delete(connection, part, f"{round_key}/")
            self._write(connection, records, written)

    def _read(
        self,
        table: sql.Table,
        part: str,
        kind: type[Any],
        *,
        prefix: str = "",
        since: str = "",
        newest: int | None = None,
    ) -> dict[str, Any]:
        """The values of a part by their keys, in the order of these; all, or from a key on."""
        query = sql.select(table.c.key, table.c.value).where(
            table.c.run_id == self.run_id,
            table.c.part == part,
            table.c.key.between(max(prefix, since), prefix + _LAST),
        )
        with connect(self._engine) as connection:
            rows = [*read_rows(connection, query.order_by(table.c.key.desc()).limit(newest))]
            return {key: from_plain(kind, json.loads(text), f"{part}[{key!r:.80}]") for key, text in reversed(rows)}

    def _write(self, connection: sql.Connection, table: sql.Table, changes: list[Change]) -> None:
        rows = [
            {"run_id": self.run_id, "part": change.part, "key": change.key, "value": change.text} for change in changes
        ]
        if rows:
            connection.execute(_build_deletion(table), rows)
        if written := [row for row in rows if row["value"] is not None]:
            connection.execute(table.insert(), written)

    def _delete(self, connection: sql.Connection, part: str, prefix: str) -> None:
        same = (records.c.run_id == self.run_id, records.c.part == part)
        connection.execute(records.delete().where(*same, records.c.key.between(prefix, prefix + _LAST)))


def _has_lost_clients(before: RunState, after: RunState) -> bool:
    """Whether clients have no part in the open round any more; those that become idle have one."""
    if before.idle and not after.idle:
        return True
    gone = (name for name in before.clients if name not in after.clients)
    return any(not any(name in names for names in after.idle.values()) for name in gone)


@cache
def _build_deletion(table: sql.Table) -> sql.Delete:
    """The statement that deletes rows by their primary keys, built once: each step of a run executes it."""
    return table.delete().where(*(column == sql.bindparam(column.name) for column in table.primary_key))


def _join_key(*numbers: int) -> str:
    """A key of a record that sorts as the numbers do, which are rounds and below 2^31."""
    return "/".join(f"{number:010d}" for number in numbers)


def _build_run_row(at: RunState) -> dict[str, Any]:
    """The columns of a run that follow from its state."""
    own = {"phase": at.phase, "round": at.round, "aggregated_round": at.aggregated_round, "failure": at.failure}
    return {**own, "attempt": at.attempt, "lost": at.failed_attempts.lost, "waits_for": at.failed_attempts.waits_for}


def _name_work(phase: str) -> str:
    """The kind of work that the client states of a phase are for."""
    return {"evaluate": "evaluate", "deploy": "deploy", "finished": "deploy"}.get(phase, "train")
