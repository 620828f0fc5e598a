"""Writes the agent's messages. Their ids follow from what they say: said twice, it is known as said once."""

from dataclasses import replace
from typing import Literal

from subfleet.agent.actions import MeasureForRound
from subfleet.agent.events import EvaluationEnded, Measured, Placed, Scored, Trained
from subfleet.agent.states import AgentSettings, Job
from subfleet.protocol.messages import (
    Ack,
    Deployed,
    Evaluated,
    Presence,
    Refusal,
    RefusalReason,
    RoundInfo,
    Scores,
    Task,
    Telemetry,
    Update,
)

__all__ = ["ack", "deployed", "evaluated", "presence", "refusal", "scores", "telemetry", "telemetry_id", "update"]

MAX_DETAIL_CHARACTERS = 500


def presence(settings: AgentSettings, now_s: float, *, online: bool = True, reason: str = "") -> Presence:
    """A heartbeat; with `online` False the will, or with a reason, too, the goodbye."""
    return Presence(
        client_id=settings.client_id,
        session_id=settings.session_id,
        online=online,
        message_id=f"presence.{settings.session_id}.{now_s:.3f}.{int(online)}",
        reason=reason,
    )


def ack(
    settings: AgentSettings, task: Task, status: Literal["accepted", "duplicate", "refused"], reason: str = ""
) -> Ack:
    """Tells the server that a task came."""
    message_id = f"ack.{settings.session_id}.{task.message_id}"
    return Ack(of=task.message_id, status=status, reason=reason, message_id=message_id)


def telemetry(settings: AgentSettings, event: Measured, now_s: float) -> Telemetry:
    """What was measured; one id per try of a round, and one per moment outside rounds."""
    info = event.measure.info if isinstance(event.measure, MeasureForRound) else None
    regular_id = f"telemetry.{settings.session_id}.{now_s:.3f}"
    return Telemetry(
        client_id=settings.client_id,
        session_id=settings.session_id,
        run_id=None if info is None else info.run_id,
        round=None if info is None else info.round,
        log_time_s=event.log_time_s,
        reading=event.reading,
        memory_budget_bytes=event.memory_budget_bytes,
        message_id=regular_id if info is None else telemetry_id(settings, info),
        retry=0 if info is None else info.retry,
        log_low=event.log_low,
        disk_budget_bytes=event.disk_budget_bytes,
    )


def telemetry_id(settings: AgentSettings, info: RoundInfo) -> str:
    """The id of the telemetry that answers an announcement."""
    name = f"telemetry.{settings.session_id}.{info.run_id}.{info.round}"
    return name + (f".{info.retry}" if info.retry else "")


def update(settings: AgentSettings, job: Job, event: Trained, now_s: float) -> Update:
    """The answer to a training that went well."""
    task, result = job.task, event.result
    return Update(
        task_id=task.task_id,
        run_id=task.run_id,
        round=task.round,
        client_id=settings.client_id,
        blob=event.blob,
        sample_count=result.sample_count,
        step_count=result.step_count,
        loss=result.loss,
        accuracy=result.accuracy,
        measured_peak_bytes=result.measured_peak_bytes,
        train_seconds=result.train_seconds,
        seconds=now_s - job.arrived_at_s,
        message_id=f"update.{task.task_id}",
        square_loss=result.square_loss,
        operator_examples=result.operator_examples,
    )


def scores(settings: AgentSettings, job: Job, event: Scored, now_s: float) -> Scores:
    """The answer to a score task."""
    return Scores(
        task_id=job.task.task_id,
        run_id=job.task.run_id,
        round=job.task.round,
        client_id=settings.client_id,
        scores=tuple(replace(one, reason=_sendable(one.reason)) for one in event.scores),
        seconds=now_s - job.arrived_at_s,
        message_id=f"scores.{job.task.task_id}",
    )


def evaluated(settings: AgentSettings, job: Job, event: EvaluationEnded, now_s: float) -> Evaluated:
    """The answer to an evaluate task."""
    result = event.result
    return Evaluated(
        task_id=job.task.task_id,
        run_id=job.task.run_id,
        round=job.task.round,
        client_id=settings.client_id,
        loss=result.loss,
        accuracy=result.accuracy,
        sample_count=result.sample_count,
        label_count=result.label_count,
        class_counts=result.class_counts,
        class_correct=result.class_correct,
        measured_peak_bytes=result.measured_peak_bytes,
        scores=result.scores,
        sums=result.sums,
        seconds=now_s - job.arrived_at_s,
        message_id=f"evaluated.{job.task.task_id}",
    )


def deployed(settings: AgentSettings, job: Job, event: Placed) -> Deployed:
    """The answer to a deploy task whose models are in place."""
    return Deployed(
        task_id=job.task.task_id,
        run_id=job.task.run_id,
        client_id=settings.client_id,
        files=event.files,
        message_id=f"deployed.{job.task.task_id}",
    )


def refusal(
    settings: AgentSettings, job: Job, reason: RefusalReason, detail: str, available_bytes: int | None
) -> Refusal:
    """The answer to a task that is not done, and why."""
    return Refusal(
        task_id=job.task.task_id,
        run_id=job.task.run_id,
        round=job.task.round,
        client_id=settings.client_id,
        reason=reason,
        detail=_sendable(detail),
        available_bytes=available_bytes,
        message_id=f"refusal.{job.task.task_id}",
    )


def _sendable(text: str) -> str:
    """Odd file names stand in error texts; the wire takes neither NUL nor half a character."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")[:MAX_DETAIL_CHARACTERS]
