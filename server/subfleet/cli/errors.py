"""Turns every error that ends a command into one sentence and an exit code."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from subfleet.protocol.errors import MissingExtraError, SubfleetError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.interruption import interruptible
from subfleet.protocol.logs import log_to_standard_error
from subfleet.protocol.plugins import explain_plugin_error
from subfleet.protocol.text import make_printable

_LOG = logging.getLogger(__name__)
_EXTRA_OF_PACKAGE = {"flwr_datasets": "emulation", "amqtt": "server", "torch": "export"}


def describe_error(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the sentence for an error."""
    if isinstance(error, SubfleetError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted; run the same command again to continue"
    if sentence := explain_plugin_error(error):
        return ExitCode.CONFIG, sentence
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        missing = MissingExtraError(package, _EXTRA_OF_PACKAGE.get(package, "server"))
        return missing.exit_code, str(missing)
    return ExitCode.INTERNAL, f"this is a defect of Subfleet ({type(error).__name__}: {error}); --verbose shows where"


@contextmanager
def report_errors(*, verbose: bool) -> Iterator[None]:
    """Run a command; an error is written to standard error as one sentence, and the process exits with its code."""
    level = logging.DEBUG if verbose else logging.WARNING
    log_to_standard_error(level, form="%(asctime)s %(name)s %(levelname)s %(message)s")
    with interruptible() as interrupted:
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - users see no traceback
            code, sentence = describe_error(KeyboardInterrupt() if interrupted() else error)
            if verbose:
                _LOG.exception("the command failed")
            lines = "\n".join(map(make_printable, sentence.splitlines()))
            sys.stderr.write(f"subfleet: {lines}\n")
            sys.exit(int(code))
