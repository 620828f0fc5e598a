"""Observers of a run beside the display: experiment trackers, registered as entry points.

An entry point of the group "subfleet.observers" is a function of a run and its folder that returns a context manager
with a `RunObserver`. The context ends with the run, also if the run fails.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import RunObserver
from subfleet.protocol.errors import RunError
from subfleet.protocol.registry import Registry
from subfleet.settings.run import Run
from subfleet.settings.run_folder import check_not_over, create_folder, write_description

__all__ = ["OBSERVERS", "ObserverFactory", "observe_run", "open_run_folder"]

_LOG = logging.getLogger(__name__)

ObserverFactory = Callable[[Run, Path], AbstractContextManager[RunObserver]]

OBSERVERS: Registry[ObserverFactory] = Registry(
    "subfleet.observers",
    "observer",
    check=lambda factory, name: "" if callable(factory) else "it must be a function of a run and its folder",
)
"""All installed observers by name."""


class _StartObserver:
    """Records whether a round has begun."""

    begun = False

    def say(self, text: str) -> None:
        """See `RunObserver.say`."""

    def round_finished(self, record: object) -> None:
        """See `RunObserver`."""
        self.begun = True

    progressed = round_finished


@contextmanager
def open_run_folder(folder: Path, run: Run, display: RunObserver) -> Iterator[tuple[Path, RunObserver]]:
    """A context with the folder of a run and its description; a new folder is removed if the run cannot start.

    A folder stays if it existed before, if a round has begun, or after a `RunError`, because its output of devices may
    explain the error.

    Args:
        folder: created if it is missing.
        run: written into the folder.
        display: observes the run.

    Yields:
        The absolute path of the folder, and the observer to use instead of the display.

    Raises:
        FileError: the folder or the description cannot be written.
        ConfigError: the folder belongs to another run, or to a finished run.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    start = _StartObserver()
    try:
        absolute = create_folder(folder)
        check_not_over(absolute, run)
        write_description(absolute, run)
        yield absolute, GuardedObserver(display, start)
    except RunError:
        raise
    except BaseException:
        if folder in missing and not start.begun:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                for parent in missing[1:]:
                    parent.rmdir()
        raise


@contextmanager
def observe_run(run: Run, folder: Path, first: RunObserver) -> Iterator[RunObserver]:
    """A context with an observer that passes everything on to one observer, then to those that the run names.

    Args:
        run: names the observers.
        folder: of the run; observers may write into it.
        first: is called before the others.

    Raises:
        ConfigError: there is no observer of a name, or it cannot be loaded.
        MissingExtraError: an observer needs a package that is not installed.
    """
    with ExitStack() as stack:
        others = [stack.enter_context(_enter(name, OBSERVERS.load(name)(run, folder))) for name in run.observers]
        yield GuardedObserver(first, *others)


@contextmanager
def _enter(name: str, context: AbstractContextManager[RunObserver]) -> Iterator[RunObserver]:
    """The observer of a context. Errors at the end of the context, and errors that it suppresses, have no effect."""
    observer = context.__enter__()
    error: BaseException | None = None
    try:
        yield observer
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            context.__exit__(None if error is None else type(error), error, getattr(error, "__traceback__", None))
        except (Exception, SystemExit) as other:  # noqa: BLE001 - errors of plug-ins do not affect the run
            if other is not error:
                _LOG.error("the observer %r raised %s at its end: %s", name, type(other).__name__, other)
