"""Errors of the system are explained: what the problem is, the reason, and a remedy."""

import errno
import os

import pytest

from subfleet.protocol.errors import FileError, explain_os_errors


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"), (OSError("cut off"), "cut off")],
)
def test_the_reason_is_the_systems_or_else_the_errors(error: OSError, reason: str) -> None:
    with (
        pytest.raises(FileError, match=rf"^the log cannot be written \({reason}\); free some space$"),
        explain_os_errors("the log cannot be written", "free some space"),
    ):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match=r"^odd$"), explain_os_errors("the log cannot be written", "free some space"):
        raise ValueError("odd")
