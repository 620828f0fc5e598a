"""Explains errors to the user of a device, as one sentence and an exit code; defines the format of its logs."""

from subfleet.protocol.errors import MissingExtraError, SubfleetError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.plugins import explain_plugin_error

LOG_FORM = "%(asctime)s %(levelname)s %(message)s"
"""A format of `logging.Formatter`."""


def explain_error(error: Exception) -> tuple[ExitCode, str]:
    """Return the exit code and the sentence for an error that ends a command or the worker process."""
    if isinstance(error, SubfleetError):
        return error.exit_code, str(error)
    if sentence := explain_plugin_error(error):
        return ExitCode.CONFIG, sentence
    if isinstance(error, ModuleNotFoundError):
        missing = MissingExtraError((error.name or "").partition(".")[0], "edge")
        return missing.exit_code, str(missing)
    text = f"this is a defect of Subfleet ({type(error).__name__}: {error}); --verbose shows where"
    return ExitCode.INTERNAL, text
