"""Protects a run from errors of its observers."""

import logging
from collections.abc import Callable

from subfleet.journal.evaluations import EvaluationRecord, describe_spread
from subfleet.journal.records import EvaluationObserver, Progress, ProgressObserver, RoundRecord, RunObserver

_LOG = logging.getLogger(__name__)


class GuardedObserver:
    """Passes everything on to some observers. An exception of an observer is logged and affects nothing else."""

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def say(self, text: str) -> None:
        """See `RunObserver.say`."""
        self._tell(lambda observer: observer.say(text))

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver.round_finished`."""
        self._tell(lambda observer: observer.round_finished(record))

    def evaluated(self, record: EvaluationRecord) -> None:
        """See `EvaluationObserver.evaluated`; other observers get a sentence instead."""

        def tell(observer: RunObserver) -> None:
            if isinstance(observer, EvaluationObserver):
                observer.evaluated(record)
            else:
                observer.say(describe_spread(record))

        self._tell(tell)

    def progressed(self, progress: Progress) -> None:
        """See `ProgressObserver.progressed`; other observers are skipped."""
        self._tell(lambda observer: observer.progressed(progress) if isinstance(observer, ProgressObserver) else None)

    def _tell(self, tell: Callable[[RunObserver], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # rich exits if nobody reads its output any more
                _LOG.error(
                    "%s cannot show what happens (%s: %s); the run goes on",
                    type(observer).__name__,
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
