"""Logs the device's answers."""

import logging

from subfleet.protocol.answers import Answer, Evaluated, Refusal, Scores, Update
from subfleet.protocol.messages import Telemetry

__all__ = ["log_answer"]

_LOG = logging.getLogger(__name__)


def log_answer(message: Telemetry | Answer) -> None:
    """Log how a task ended; telemetry is not logged."""
    match message:
        case Update():
            _LOG.info("task %s: trained, loss %.4f, %.1f s", message.task_id, message.loss, message.train_seconds)
        case Scores():
            _LOG.info("task %s: %d candidates scored, %.1f s", message.task_id, len(message.scores), message.seconds)
        case Evaluated():
            _LOG.info("task %s: evaluated, loss %.4f, %.1f s", message.task_id, message.loss, message.seconds)
        case Refusal():
            _LOG.warning("task %s: refused (%s): %s", message.task_id, message.reason, message.detail)
