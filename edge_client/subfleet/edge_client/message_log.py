"""Logs each message of the server once, and the device's answers."""

import logging

from subfleet.agent.composing import make_telemetry_id
from subfleet.agent.states import AgentSettings
from subfleet.protocol.answers import Answer, Evaluated, Refusal, Scores, Update
from subfleet.protocol.messages import Ack, Message, RoundInfo, Task, Telemetry
from subfleet.protocol.text import make_printable

_LOG = logging.getLogger(__name__)


class ReceivedLog:
    """Logs received messages.

    Args:
        settings: the agent's settings.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._round: RoundInfo | None = None
        self._declared: Ack | None = None
        self._skipped = ""

    def note(self, message: Message) -> None:
        """Log a received message if it is new."""
        if isinstance(message, RoundInfo):
            self._log_announcement(message)
        elif isinstance(message, Task):
            self._skipped = ""
            name = make_printable(message.architecture.name or message.architecture.architecture_id)
            _LOG.info("task %s: %s %s", message.task_id, message.work.TYPE, name)
        elif isinstance(message, Ack) and message.of == self._settings.profile.message_id:
            self._log_declaration(message)
        elif isinstance(message, Ack) and message.reason and message.status != "refused":
            self._log_reason(message)

    def _log_announcement(self, info: RoundInfo) -> None:
        known, self._round = self._round, info
        if known is None or info.message_id != known.message_id:
            again = f", attempted again ({info.attempt})" if info.attempt else ""
            _LOG.info("run %s round %d of %d: %s%s", info.run_id, info.round, info.round_count, info.phase, again)

    def _log_declaration(self, answer: Ack) -> None:
        known, self._declared = self._declared, answer
        if answer == known:
            return
        if answer.status == "refused":
            _LOG.warning("the declared architecture is refused (%s): %s", answer.problem, make_printable(answer.reason))
        else:
            _LOG.info("the declared architecture is %s", answer.status)

    def _log_reason(self, answer: Ack) -> None:
        """Log why the device has no task in the current round."""
        info = self._round
        if info is None or answer.of != make_telemetry_id(self._settings, info):
            return
        if answer.reason != self._skipped:
            self._skipped = answer.reason
            _LOG.warning("round %d: this device has no task: %s", info.round, make_printable(answer.reason))


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
