"""The first steps of both programs: refuse an unsupported system, and set up the process."""

import io
import os
import sys

from subfleet.protocol.errors import UnsupportedSystemError
from subfleet.protocol.exit_codes import ExitCode


def settle(program: str) -> ExitCode:
    """Prepare this process for a command; OK if it may continue.

    The console shows replacements for characters that it cannot encode, libraries find a home, and scratch files of
    killed processes are removed.

    Args:
        program: name of the command, for messages.
    """
    if sys.platform == "win32":
        refused = UnsupportedSystemError()
        sys.stderr.write(f"{program}: {refused}\n")
        return refused.exit_code
    from subfleet.protocol.homes import set_home  # uses a module that Windows lacks
    from subfleet.protocol.scratch import list_scratch_folders, sweep

    _soften(sys.stdout)
    set_home(os.environ)
    sweep(list_scratch_folders())
    return ExitCode.OK


def _soften(stream: object) -> None:
    # Standard error replaces by default. An explicit PYTHONIOENCODING stays.
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")
