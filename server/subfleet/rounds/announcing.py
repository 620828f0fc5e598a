"""Announcements of the open phase: to all devices, or to one that is asked for its telemetry. Pure."""

from collections.abc import Mapping
from typing import Any

from subfleet.protocol.messages import RoundInfo
from subfleet.rounds.context import RunContext
from subfleet.rounds.signals import Ask
from subfleet.rounds.state import RunState


def build_round_info(context: RunContext, state: RunState, now_s: float) -> RoundInfo | None:
    """The announcement of the current phase to all devices; None between rounds.

    Its message id is derived from its content, so that devices recognise repetitions.
    """
    phases: Mapping[str, tuple[Any, float]] = {
        "measure": ("measure", context.config.deadlines.measure_s),
        "train": ("train", context.config.deadlines.round_s),
        "evaluate": ("train", context.config.deadlines.evaluate_s),
        "search": ("train", context.config.deadlines.evaluate_s),
        "deploy": ("train", context.config.deadlines.deploy_s),
        "finished": ("finished", context.config.deadlines.linger_s),
        "failed": ("finished", context.config.deadlines.linger_s),
    }
    if state.phase not in phases:
        return None
    phase, limit_s = phases[state.phase]
    goes_on = state.phase == "train" and context.config.asynchronous is not None  # such a phase has no deadline
    return _build_info(context, state, phase, limit_s if goes_on else limit_s - (now_s - state.live.entered_s))


def build_ask(context: RunContext, state: RunState, client_id: str) -> Ask:
    """Ask one device for its telemetry in an asynchronous round."""
    info = _build_info(context, state, "measure", context.config.deadlines.measure_s)
    return Ask(client_id=client_id, info=info)


def _build_info(context: RunContext, state: RunState, phase: Any, left_s: float) -> RoundInfo:
    again = f".{state.attempt}" if state.attempt else ""
    return RoundInfo(
        run_id=context.run_id,
        round=state.round,
        round_count=context.config.total_rounds,
        phase=phase,
        log_time_s=context.config.log_time_s(max(state.run_attempt, 1)),
        deadline_s=max(0.0, left_s),
        message_id=f"{context.run_id}/{state.round}{again}/{phase}",
        attempt=state.attempt,
        log_quantile=context.log_quantile if phase == "measure" else None,
        sample_bytes=context.sample_bytes,
        asynchronous=state.phase == "train" and context.config.asynchronous is not None,
    )
