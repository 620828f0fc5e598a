"""Who hears of a run while it goes on, besides a screen: experiment trackers, by the name of an entry point.

An observer is registered under "subfleet.observers" as a function that takes a run and its folder, and gives a context
whose value is a `RunObserver`; the context ends with the run, however it ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import Progress, RoundRecord, RunObserver
from subfleet.protocol.registry import Registry
from subfleet.settings.run import Run

__all__ = ["OBSERVERS", "ObserverFactory", "observed"]

ObserverFactory = Callable[[Run, Path], AbstractContextManager[RunObserver]]

OBSERVERS: Registry[ObserverFactory] = Registry(
    "subfleet.observers",
    "observer",
    check=lambda found, name: "" if callable(found) else "it must be a function of a run and its folder",
)
"""Every observer that is installed, by name."""


class _All:
    """Tells several observers; what one of them raises ends neither the run nor the others."""

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = tuple(map(GuardedObserver, observers))

    def say(self, text: str) -> None:
        """See `RunObserver.say`."""
        for one in self._observers:
            one.say(text)

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver.round_finished`."""
        for one in self._observers:
            one.round_finished(record)

    def evaluated(self, record: EvaluationRecord) -> None:
        """See `EvaluationObserver.evaluated`."""
        for one in self._observers:
            one.evaluated(record)

    def progressed(self, progress: Progress) -> None:
        """See `ProgressObserver.progressed`."""
        for one in self._observers:
            one.progressed(progress)


@contextmanager
def observed(run: Run, folder: Path, first: RunObserver) -> Iterator[RunObserver]:
    """An observer, and those that the run names.

    Args:
        run: what is run.
        folder: of the run, where observers may keep what they note.
        first: is told before them.

    Raises:
        ConfigError: there is no observer of a name, or it cannot be loaded.
        MissingExtraError: an observer needs a package that is not installed.
    """
    with ExitStack() as stack:
        others = [stack.enter_context(OBSERVERS.named(name)(run, folder)) for name in run.observers]
        yield _All([first, *others])
