"""Keeps a run apart from those who watch it: whatever a screen does, the run goes on."""

import logging
from collections.abc import Callable

from subfleet.journal.evaluations import EvaluationRecord, describe_spread
from subfleet.journal.records import EvaluationObserver, Progress, ProgressObserver, RoundRecord, RunObserver

_LOG = logging.getLogger(__name__)


class GuardedObserver:
    """Tells an observer everything; what the observer raises is logged, and ends nothing.

    Args:
        observer: who wants to hear of the run.
    """

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer

    def say(self, text: str) -> None:
        """See `RunObserver.say`."""
        self._tell(lambda: self._observer.say(text))

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver.round_finished`."""
        self._tell(lambda: self._observer.round_finished(record))

    def evaluated(self, record: EvaluationRecord) -> None:
        """See `EvaluationObserver.evaluated`; one that does not want to hear of it is told in words."""
        observer = self._observer
        if isinstance(observer, EvaluationObserver):
            self._tell(lambda: observer.evaluated(record))
        else:
            self.say(describe_spread(record))

    def progressed(self, progress: Progress) -> None:
        """See `ProgressObserver.progressed`; one that does not want to hear of it is told nothing."""
        observer = self._observer
        if isinstance(observer, ProgressObserver):
            self._tell(lambda: observer.progressed(progress))

    def _tell(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # rich leaves where nobody reads its output any more
            _LOG.error(
                "%s cannot show what happens (%s: %s); the run goes on",
                type(self._observer).__name__,
                type(error).__name__,
                error,
                exc_info=_LOG.isEnabledFor(logging.DEBUG),
            )


class Unobserved:
    """The observer of a run that nobody watches."""

    def say(self, text: str) -> None:
        """Nobody listens."""

    def round_finished(self, record: RoundRecord) -> None:
        """Nobody looks."""
