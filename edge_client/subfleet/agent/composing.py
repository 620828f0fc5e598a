"""Composes the agent's messages. Ids are derived from the content, so that a repeated message is recognised."""

from dataclasses import replace
from typing import Literal

from subfleet.agent.actions import MeasureForRound
from subfleet.agent.events import Measured
from subfleet.agent.outcomes import EvaluationEnded, ModelsPlaced, ScoringEnded, TrainingEnded
from subfleet.agent.states import AgentSettings, CurrentTask
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

MAX_DETAIL_CHARACTERS = 500


def compose_presence(settings: AgentSettings, now_s: float, *, online: bool = True, reason: str = "") -> Presence:
    """Compose a heartbeat; with `online` False the will, or with a reason the goodbye."""
    return Presence(
        client_id=settings.client_id,
        session_id=settings.session_id,
        online=online,
        message_id=f"presence.{settings.session_id}.{now_s:.3f}.{int(online)}",
        reason=reason,
    )


def compose_ack(
    settings: AgentSettings, task: Task, status: Literal["accepted", "duplicate", "refused"], reason: str = ""
) -> Ack:
    """Compose the ack of a task."""
    message_id = f"ack.{settings.session_id}.{task.message_id}"
    return Ack(of=task.message_id, status=status, reason=reason, message_id=message_id)


def compose_telemetry(settings: AgentSettings, event: Measured, now_s: float) -> Telemetry:
    """Compose telemetry; its id is unique per attempt of a round, or per moment outside rounds."""
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
        message_id=regular_id if info is None else make_telemetry_id(settings, info),
        attempt=0 if info is None else info.attempt,
        log_low=event.log_low,
        disk_budget_bytes=event.disk_budget_bytes,
    )


def make_telemetry_id(settings: AgentSettings, info: RoundInfo) -> str:
    """Make the id of the telemetry that answers an announcement."""
    name = f"telemetry.{settings.session_id}.{info.run_id}.{info.round}"
    return name + (f".{info.attempt}" if info.attempt else "")


def compose_update(settings: AgentSettings, current: CurrentTask, event: TrainingEnded, now_s: float) -> Update:
    """Compose the answer to a finished training or calibration."""
    task, result = current.task, event.result
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
        seconds=now_s - current.arrived_at_s,
        message_id=f"update.{task.task_id}",
        square_loss=result.square_loss,
        operator_examples=result.operator_examples,
    )


def compose_scores(settings: AgentSettings, current: CurrentTask, event: ScoringEnded, now_s: float) -> Scores:
    """Compose the answer to a score task."""
    return Scores(
        task_id=current.task.task_id,
        run_id=current.task.run_id,
        round=current.task.round,
        client_id=settings.client_id,
        scores=tuple(replace(score, reason=_make_sendable(score.reason)) for score in event.scores),
        seconds=now_s - current.arrived_at_s,
        message_id=f"scores.{current.task.task_id}",
    )


def compose_evaluation(
    settings: AgentSettings, current: CurrentTask, event: EvaluationEnded, now_s: float
) -> Evaluated:
    """Compose the answer to an evaluate task."""
    result = event.result
    return Evaluated(
        task_id=current.task.task_id,
        run_id=current.task.run_id,
        round=current.task.round,
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
        seconds=now_s - current.arrived_at_s,
        message_id=f"evaluated.{current.task.task_id}",
    )


def compose_deployment(settings: AgentSettings, current: CurrentTask, event: ModelsPlaced) -> Deployed:
    """Compose the answer to a finished deploy task."""
    return Deployed(
        task_id=current.task.task_id,
        run_id=current.task.run_id,
        client_id=settings.client_id,
        files=event.files,
        message_id=f"deployed.{current.task.task_id}",
    )


def compose_refusal(
    settings: AgentSettings, current: CurrentTask, reason: RefusalReason, detail: str, available_bytes: int | None
) -> Refusal:
    """Compose the answer to a task that is not done."""
    return Refusal(
        task_id=current.task.task_id,
        run_id=current.task.run_id,
        round=current.task.round,
        client_id=settings.client_id,
        reason=reason,
        detail=_make_sendable(detail),
        available_bytes=available_bytes,
        message_id=f"refusal.{current.task.task_id}",
    )


def _make_sendable(text: str) -> str:
    """Replace NUL and lone surrogates, which error texts with odd file names contain and JSON cannot carry."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")[:MAX_DETAIL_CHARACTERS]
