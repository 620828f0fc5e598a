"""Who hears of a run while it goes on, besides a screen: experiment trackers, by the name of an entry point.

An observer is registered under "subfleet.observers" as a function that takes a run and its folder, and gives a context
whose value is a `RunObserver`; the context ends with the run, however it ends.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import Progress, RoundRecord, RunObserver
from subfleet.protocol.errors import RunError
from subfleet.protocol.registry import Registry
from subfleet.settings.run import Run
from subfleet.settings.run_folder import check_not_over, create_folder, write_description

__all__ = ["OBSERVERS", "ObserverFactory", "observed", "started"]

_LOG = logging.getLogger(__name__)

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


class _Beginning:
    """Knows whether a round of a run has begun."""

    begun = False

    def say(self, text: str) -> None:
        """See `RunObserver.say`."""

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver.round_finished`."""
        self.begun = True

    def progressed(self, progress: Progress) -> None:
        """See `ProgressObserver.progressed`."""
        self.begun = True


@contextmanager
def started(folder: Path, run: Run, display: RunObserver) -> Iterator[tuple[Path, RunObserver]]:
    """A run's folder with its description; a start that fails leaves no folder behind.

    A folder that was there before stays in any case, and so does one in which a round has begun, or whose run could not
    go on: what its devices have put out there says more.

    Args:
        folder: which is made where it is missing.
        run: what is run.
        display: is told of the run.

    Yields:
        The folder's absolute path, and what is to be told of the run in place of the display.

    Raises:
        FileError: the folder or the description cannot be written.
        ConfigError: the folder is that of another run, or of one that is over.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    beginning = _Beginning()
    try:
        place = create_folder(folder)
        check_not_over(place, run)
        write_description(place, run)
        yield place, _All([display, beginning])
    except RunError:
        raise
    except BaseException:
        if folder in missing and not beginning.begun:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                for parent in missing[1:]:
                    parent.rmdir()
        raise


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
        others = [stack.enter_context(_entered(name, OBSERVERS.named(name)(run, folder))) for name in run.observers]
        yield _All([first, *others])


@contextmanager
def _entered(name: str, context: AbstractContextManager[RunObserver]) -> Iterator[RunObserver]:
    """The observer of a context, whose end ends neither the run nor the others, whatever it raises or swallows."""
    observer = context.__enter__()
    try:
        yield observer
    except BaseException as error:
        _end(name, context, error)
        raise
    _end(name, context, None)


def _end(name: str, context: AbstractContextManager[RunObserver], error: BaseException | None) -> None:
    try:
        context.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)
    except (Exception, SystemExit) as other:  # noqa: BLE001 - whatever others' code raises concerns them alone
        if other is not error:
            _LOG.error("the observer %r raised %s at its end: %s", name, type(other).__name__, other)
