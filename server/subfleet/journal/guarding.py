"""Protects a run from errors of its observers."""

import logging
from collections.abc import Callable
from functools import partial

from subfleet.journal.evaluations import EvaluationRecord, describe_spread
from subfleet.journal.records import EvaluationObserver, Progress, ProgressObserver, RoundRecord, RunObserver

_LOG = logging.getLogger(__name__)


class GuardedObserver:
    """Passes everything on to some observers. An exception of an observer is logged and affects nothing else."""

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def say(self, text: str) -> None:
        """See `RunObserver.say`."""
        for observer in self._observers:
            _call(observer, partial(observer.say, text))

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver.round_finished`."""
        for observer in self._observers:
            _call(observer, partial(observer.round_finished, record))

    def evaluated(self, record: EvaluationRecord) -> None:
        """See `EvaluationObserver.evaluated`; other observers get a sentence instead."""
        for observer in self._observers:
            if isinstance(observer, EvaluationObserver):
                _call(observer, partial(observer.evaluated, record))
            else:
                _call(observer, partial(observer.say, describe_spread(record)))

    def progressed(self, progress: Progress) -> None:
        """See `ProgressObserver.progressed`; other observers are skipped."""
        for observer in self._observers:
            if isinstance(observer, ProgressObserver):
                _call(observer, partial(observer.progressed, progress))


def _call(observer: RunObserver, method: Callable[[], None]) -> None:
    try:
        method()
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
