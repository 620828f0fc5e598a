"""Which stored seats a state is made of."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import sqlalchemy as sql

from subfleet.journal.database import tasks
from subfleet.rounds.state import LastEvaluation, Seat

__all__ = ["evaluated", "needed_seats", "was_folded"]


def needed_seats(run_id: str, round_number: int, folded_round: int) -> sql.Select[Any]:
    """The rows of the open round, and each client's newest that was folded or evaluated; a long run has many more."""
    done = sql.and_(
        tasks.c.run_id == run_id,
        tasks.c.work.in_(("train", "evaluate")),
        tasks.c.stage == "done",
        tasks.c.round <= folded_round,
    )
    newest = (
        sql.select(tasks.c.client_id, tasks.c.work, sql.func.max(tasks.c.round).label("round"))
        .where(done)
        .group_by(tasks.c.client_id, tasks.c.work)
        .subquery()
    )
    is_last = sql.and_(
        done,
        tasks.c.client_id == newest.c.client_id,
        tasks.c.work == newest.c.work,
        tasks.c.round == newest.c.round,
    )
    needed = sql.or_(
        sql.and_(tasks.c.run_id == run_id, tasks.c.round == round_number), sql.exists().where(is_last).correlate(tasks)
    )
    return sql.select(tasks).where(needed).order_by(tasks.c.round)


def evaluated(until_round: int, seats: list[tuple[int, str, Seat]]) -> Mapping[str, LastEvaluation]:
    """What each client found last, after the rounds up to one; seats come in the order of their rounds."""
    return MappingProxyType(
        {
            seat.client_id: LastEvaluation(round=number, evaluated=seat.evaluated)
            for number, work, seat in seats
            if work == "evaluate" and number <= until_round and seat.stage == "done" and seat.evaluated is not None
        }
    )


def was_folded(folded_round: int, number: int, work: str, seat: Seat) -> bool:
    """Whether a seat's update is in the model of a round."""
    return work == "train" and number <= folded_round and seat.stage == "done"
