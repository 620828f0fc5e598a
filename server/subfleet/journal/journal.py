"""The journal of runs: what a server needs to take a run up, and what people ask.

Rows carry the facts that people query as columns, and the whole record as canonical JSON, read back through the same
checked door as any message.
"""

import datetime
import json
import uuid
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, get_args

import sqlalchemy as sql

from subfleet.elastic.lineage import Lineage
from subfleet.journal.database import clients, evaluations, generations, programs, rounds, runs, tasks, updates
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.generations import GenerationRecord
from subfleet.journal.reading import connected, place_of, typed_rows, typed_scalars, understood
from subfleet.journal.records import RoundRecord
from subfleet.journal.stored_seats import evaluated, needed_seats, was_folded
from subfleet.methods.assigner import Unfit
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import MAX_ROUNDS, Profile
from subfleet.protocol.schema import canonical_json, from_plain
from subfleet.rounds.actions import Close, CloseEvaluation, CloseGeneration
from subfleet.rounds.attempts import Failing, Tries
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.state import Member, Phase, RunState, Seat, Suspicion
from subfleet.rounds.written import WrittenProgram
from subfleet.search.query import FoundSize
from subfleet.search.queue import SizedProgram
from subfleet.settings.resuming import check_taken_up

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
            start = {"phase": "waiting", "round": 0, "folded_round": 0, "failure": "", "started_at": _now()}
            start |= {"retry": 0, "lost": 0, "waits_for": "", "pool": "[]", "queue": "[]", "unfit": "{}"}
            start |= {"failing": "{}", "disks": "{}", "brought": "{}"}
            start |= {"suspicion": "{}", "memory": "null", "lineages": "[]", "explored_turn": 0, "wished_turn": 0}
            connection.execute(runs.insert().values(**row, **start))
            return run_id
        remedy = "restore that, or choose another name or state folder"
        if check_taken_up(f"run {name!r}", json.loads(known.settings), json.loads(settings), remedy):
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
        with connected(self._engine) as connection:
            (run,) = typed_rows(connection, sql.select(runs).where(runs.c.run_id == self._run_id))
            _check_run(run)
            members = {
                row.client_id: Member(profile=from_plain(Profile, json.loads(row.profile)), noted_s=now_s)
                for row in typed_rows(connection, sql.select(clients).where(clients.c.run_id == self._run_id))
            }
            seats = [
                (row.round, row.work, from_plain(Seat, json.loads(row.seat)))
                for row in typed_rows(connection, needed_seats(self._run_id, run.round, run.folded_round))
            ]
            scored = _of_round(generations, self._run_id, run.folded_round)
            generation_count = connection.execute(sql.select(sql.func.count()).where(scored)).scalar_one()
            programs = typed_scalars(connection, _programs_of(self._run_id))
            written = [from_plain(WrittenProgram, json.loads(text)) for text in programs]
            return self._state_of(run, members, seats, written, generation_count, now_s)

    def _state_of(
        self,
        run: Any,
        members: dict[str, Member],
        seats: list[tuple[int, str, Seat]],
        written: list[WrittenProgram],
        generation_count: int,
        now_s: float,
    ) -> RunState:
        work = _work_of(run.phase)
        last = {seat.client_id: seat for number, of, seat in seats if was_folded(run.folded_round, number, of, seat)}
        settled = (
            seat.task for number, _, seat in seats if number == run.folded_round and last.get(seat.client_id) is seat
        )
        answered = (
            seat.task
            for number, of, seat in seats
            if (number, of, seat.stage) == (run.folded_round, "evaluate", "done") and run.phase != "evaluate"
        )
        return RunState(
            round=run.round,
            folded_round=run.folded_round,
            phase=run.phase,
            tries=_tries_of(run),
            failure=run.failure,
            entered_s=now_s,
            opened_s=now_s,
            members=PersistentMap(members),
            seats=MappingProxyType(
                {seat.client_id: seat for number, of, seat in seats if (number, of) == (run.round, work)}
                if run.phase not in ("waiting", "search") or run.round > run.folded_round
                else {}
            ),
            last=MappingProxyType(last),
            settled=frozenset(task.task_id for task in (*settled, *answered) if task is not None),
            evaluated=evaluated(run.folded_round if run.phase != "evaluate" else run.folded_round - 1, seats),
            pool=tuple(from_plain(FoundSize, plain) for plain in json.loads(run.pool)),
            explored_turn=run.explored_turn,
            wished_turn=run.wished_turn,
            generations=generation_count if run.phase == "search" else 0,
            queue=tuple(from_plain(SizedProgram, plain) for plain in json.loads(run.queue)),
            written=MappingProxyType({one.program.key: one for one in written}),
            unfit=MappingProxyType(from_plain(dict[str, Unfit], json.loads(run.unfit))),
            disks=MappingProxyType(from_plain(dict[str, int], json.loads(run.disks))),
            brought=MappingProxyType(from_plain(dict[str, tuple[str, ...]], json.loads(run.brought))),
            suspicion=from_plain(Suspicion, json.loads(run.suspicion)),
            memory=self._memory(json.loads(run.memory)),
            lineages=from_plain(tuple[Lineage, ...], json.loads(run.lineages)),
        )

    def _memory(self, plain: Any) -> Any:
        return None if plain is None else from_plain(type(self._first_memory), plain)

    def load_bytes(self, state: RunState) -> dict[str, Bytes]:
        """Bytes counted so far for each seat of the open round."""
        query = sql.select(tasks).where(
            tasks.c.run_id == self._run_id, tasks.c.round == state.round, tasks.c.work == _work_of(state.phase)
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
            close: the closed round, with its final seats and its checkpoint's digest; or a closed evaluation, or a
                generation.
            record: of the same.

        Raises:
            FileError: the database cannot be written.
        """
        # Devices that score a generation are asked anew by a server that starts anew.
        seats = () if after.seats is before.seats or after.phase == "search" else after.seats.items()
        changed = [seat for name, seat in seats if seat is not before.seats.get(name)]
        profiles = _new_profiles(before, after)
        written = [] if after.written is before.written else [*(after.written.keys() - before.written.keys())]
        values = _new_values(before, after)
        same = after.round == before.round > after.folded_round
        emptied = same and not before.seats.keys() <= after.seats.keys()
        forgotten = [name for name in before.members.changed(after.members) if name not in after.members]
        if not (changed or profiles or values or written or record or forgotten):
            return
        with self._engine.begin() as connection:
            if values:
                connection.execute(runs.update().where(runs.c.run_id == self._run_id).values(**values))
            self._save_members(connection, forgotten, profiles)
            for key in sorted(before.written.keys() - after.written.keys()):  # of networks that have retired
                gone = sql.and_(programs.c.run_id == self._run_id, programs.c.key == key)
                connection.execute(programs.delete().where(gone))
            for key in sorted(written):
                text = canonical_json(after.written[key]).decode()
                connection.execute(programs.insert().values(run_id=self._run_id, key=key, written=text))
            if emptied:  # the round is tried again, and who answered before is not waiting in it
                for table in (tasks, updates):
                    of_round = sql.and_(table.c.run_id == self._run_id, table.c.round == after.round)
                    connection.execute(table.delete().where(of_round))
            if record is not None and close is not None:
                self._save_close(connection, close, record, counted)
            for seat in changed:
                self._save_seat(connection, after.round, _work_of(after.phase), seat, counted(seat.client_id))

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

    def _save_members(self, connection: sql.Connection, forgotten: list[str], profiles: list[Profile]) -> None:
        for name in forgotten:
            mine = sql.and_(clients.c.run_id == self._run_id, clients.c.client_id == name)
            connection.execute(clients.delete().where(mine))
        for profile in profiles:
            row = {"run_id": self._run_id, "client_id": profile.client_id, "device": profile.device}
            _put(connection, clients, {**row, "profile": canonical_json(profile).decode()})

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
        for seat in close.seats:
            self._save_seat(connection, close.round, work, seat, counted(seat.client_id))

    def _save_record(self, connection: sql.Connection, record: RoundRecord, sha256: str) -> None:
        names = ("round", "accuracy", "loss", "seconds", "log_time_s")
        row = {name: getattr(record, name) for name in names}
        text = canonical_json(record).decode()
        _put(connection, rounds, {"run_id": self._run_id, **row, "checkpoint_sha256": sha256, "record": text})

    def _save_seat(self, connection: sql.Connection, round_number: int, work: str, seat: Seat, counted: Bytes) -> None:
        down, up = counted
        key = {"run_id": self._run_id, "round": round_number, "client_id": seat.client_id}
        row = {
            "stage": seat.stage,
            "reason": seat.reason,
            "spec": seat.task.spec.name if seat.task is not None else "",
            "bytes_down": down,
            "bytes_up": up,
            "seat": canonical_json(seat).decode(),
        }
        _put(connection, tasks, {**key, "work": work, **row})
        if work == "train" and seat.result is not None:
            blob, result = seat.result.blob, seat.result
            facts = {"sha256": blob.sha256, "size_bytes": blob.size_bytes, "sample_count": result.sample_count}
            _put(connection, updates, {**key, "task_id": result.task_id, **facts, "received_at": _now()})


def _check_run(run: Any) -> None:
    """Make sure that a run stands where one can stand."""
    if run.phase not in get_args(Phase):
        raise ProtocolError(f"the run's phase is {run.phase!r:.80}, but must be one of {list(get_args(Phase))}")
    if not 0 <= run.folded_round <= run.round <= run.folded_round + 1:
        raise ProtocolError(f"the run is in round {run.round} after the fold of round {run.folded_round}")
    counts = (run.round, run.retry, run.lost, run.explored_turn, run.wished_turn)
    if not all(0 <= count < MAX_ROUNDS for count in counts):
        raise ProtocolError(f"the run counts rounds, tries and turns {counts}, but must be 0 or more, and below 2^31")


def _with_metrics(plain: dict[str, Any]) -> dict[str, Any]:
    """A round's record; those of before metrics came may tell a perplexity in their place."""
    metrics = {} if (told := plain.pop("perplexity", None)) is None else {"perplexity": told}
    return {"metrics": metrics, "headline": next(iter(metrics), "accuracy"), **plain}


def _tries_of(run: Any) -> Tries:
    failing = MappingProxyType(from_plain(dict[str, Failing], json.loads(run.failing)))
    return Tries(retry=run.retry, lost=run.lost, waits_for=run.waits_for, failing=failing)


def _put(connection: sql.Connection, table: sql.Table, row: dict[str, Any]) -> None:
    """Insert a row or replace the one with its key, in words that every database understands."""
    keys = [column.name for column in table.primary_key]
    same = sql.and_(*(table.c[name] == row[name] for name in keys))
    values = {name: value for name, value in row.items() if name not in keys}
    if connection.execute(table.update().where(same).values(**values)).rowcount == 0:
        connection.execute(table.insert().values(**row))


def _of_round(table: sql.Table, run_id: str, round_number: int) -> sql.ColumnElement[bool]:
    return sql.and_(table.c.run_id == run_id, table.c.round == round_number)


def _programs_of(run_id: str) -> sql.Select[Any]:
    return sql.select(programs.c.written).where(programs.c.run_id == run_id).order_by(programs.c.key)


def _new_values(before: RunState, after: RunState) -> dict[str, Any]:
    """What has changed of the run's own row."""
    names = ("phase", "round", "folded_round", "failure", "explored_turn", "wished_turn")
    values = {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}
    tries = ("retry", "lost", "waits_for")
    values |= {name: getattr(after.tries, name) for name in tries if after.tries != before.tries}
    if after.tries.failing is not before.tries.failing:
        values["failing"] = canonical_json(after.tries.failing).decode()
    texts = ("pool", "queue", "unfit", "disks", "brought", "suspicion", "memory", "lineages")
    changed = [name for name in texts if getattr(after, name) is not getattr(before, name)]
    return values | {name: canonical_json(getattr(after, name)).decode() for name in changed}


def _new_profiles(before: RunState, after: RunState) -> list[Profile]:
    """Of members that are new or have told another; what two states share costs nothing."""
    found = []
    for name in after.members.changed(before.members):
        known, profile = before.members.get(name), after.members[name].profile
        if profile is not None and (known is None or profile is not known.profile):
            found.append(profile)
    return found


def _work_of(phase: str) -> str:
    """What the seats of a phase are for."""
    if phase == "evaluate":
        return "evaluate"
    return "deploy" if phase in ("deploy", "finished") else "train"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
