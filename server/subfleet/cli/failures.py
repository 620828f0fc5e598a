"""Turns whatever ends a command into one sentence and a numbered exit code, never a traceback."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from subfleet.protocol.errors import MissingExtraError, SubfleetError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.interruption import interruptible
from subfleet.protocol.logs import log_to_standard_error
from subfleet.protocol.plugins import explain_plugin_error
from subfleet.protocol.text import make_printable

__all__ = ["exit_code_of", "reporting"]

_LOG = logging.getLogger(__name__)
_EXTRA_OF_PACKAGE = {"flwr_datasets": "emulation", "amqtt": "server", "torch": "export"}


def exit_code_of(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the sentence for an error."""
    if isinstance(error, SubfleetError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "stopped; start the same command again to go on"
    if sentence := explain_plugin_error(error):
        return ExitCode.CONFIG, sentence
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        missing = MissingExtraError(package, _EXTRA_OF_PACKAGE.get(package, "server"))
        return missing.exit_code, str(missing)
    return ExitCode.INTERNAL, f"this is a defect of Subfleet ({type(error).__name__}: {error}); --verbose shows where"


@contextmanager
def reporting(*, verbose: bool, leave: Callable[[int], None] = sys.exit) -> Iterator[None]:
    """Run a command's body; an error becomes one sentence on standard error and an exit code."""
    level = logging.DEBUG if verbose else logging.WARNING
    log_to_standard_error(level, form="%(asctime)s %(name)s %(levelname)s %(message)s")
    with interruptible() as interrupted:
        try:
            yield
        # The rim: nothing may reach the user as a traceback.
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            code, sentence = exit_code_of(KeyboardInterrupt() if interrupted() else error)
            if verbose:
                _LOG.exception("the command failed")
            told = "\n".join(map(make_printable, sentence.splitlines()))
            sys.stderr.write(f"subfleet: {told}\n")
            leave(int(code))
