"""Keeps a run going whatever its observer raises."""

import logging
from collections.abc import Callable

from subfleet.journal.evaluations import EvaluationRecord, describe_spread
from subfleet.journal.records import EvaluationObserver, Progress, ProgressObserver, RoundRecord, RunObserver

_LOG = logging.getLogger(__name__)


class GuardedObserver:
    """Forwards everything to an observer, and logs what the observer raises.

    Args:
        observer: of the run.
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
        """See `EvaluationObserver.evaluated`; another observer gets a sentence."""
        observer = self._observer
        if isinstance(observer, EvaluationObserver):
            self._tell(lambda: observer.evaluated(record))
        else:
            self.say(describe_spread(record))

    def progressed(self, progress: Progress) -> None:
        """See `ProgressObserver.progressed`; other observers get nothing."""
        observer = self._observer
        if isinstance(observer, ProgressObserver):
            self._tell(lambda: observer.progressed(progress))

    def _tell(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # rich exits if its output is closed
            _LOG.error(
                "%s cannot show what happens (%s: %s); the run goes on",
                type(self._observer).__name__,
                type(error).__name__,
                error,
                exc_info=_LOG.isEnabledFor(logging.DEBUG),
            )


class Unobserved:
    """An observer that ignores everything."""

    def say(self, text: str) -> None:
        """Ignore it."""

    def round_finished(self, record: RoundRecord) -> None:
        """Ignore it."""
