"""Protects a run from errors of its observers."""

import logging
from typing import Any

from subfleet.journal.evaluations import EvaluationRecord, describe_spread
from subfleet.journal.records import Progress, RoundRecord, RunObserver

_LOG = logging.getLogger(__name__)


class GuardedObserver:
    """Passes everything on to some observers. An exception of an observer is logged and affects nothing else."""

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def say(self, text: str) -> None:
        """See `RunObserver.say`."""
        self._call("say", text)

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver.round_finished`."""
        self._call("round_finished", record)

    def evaluated(self, record: EvaluationRecord) -> None:
        """See `RunObserver`; observers without this method get a sentence instead."""
        self._call("evaluated", record)

    def progressed(self, progress: Progress) -> None:
        """See `RunObserver`; observers without this method are skipped."""
        self._call("progressed", progress)

    def _call(self, method: str, argument: Any) -> None:
        for observer in self._observers:
            try:
                if hasattr(observer, method):
                    getattr(observer, method)(argument)
                elif method == "evaluated":
                    observer.say(describe_spread(argument))
            except (Exception, SystemExit) as error:  # noqa: BLE001  # rich exits if nobody reads its output any more
                name, reason = type(observer).__name__, f"{type(error).__name__}: {error}"
                is_debugged = _LOG.isEnabledFor(logging.DEBUG)
                _LOG.error("%s cannot show the progress (%s); the run continues", name, reason, exc_info=is_debugged)


class Unobserved:
    """The observer of a run that nobody watches."""

    def say(self, text: str) -> None:
        """Nobody listens."""

    def round_finished(self, record: RoundRecord) -> None:
        """Nobody looks."""
