"""The watch repeats its checks, and stops the run when one fails."""

import threading

import pytest

from subfleet.link.watch import watch
from subfleet.protocol.errors import RunError


@pytest.mark.slow
def test_checks_are_repeated_until_the_end() -> None:
    checks = threading.Semaphore(0)
    stop = threading.Event()
    with watch([checks.release], stop) as raise_failure:
        assert checks.acquire(timeout=10)
        assert checks.acquire(timeout=10)
    raise_failure()
    assert not stop.is_set()


@pytest.mark.slow
def test_a_failed_check_stops_the_run_with_its_error() -> None:
    def fail() -> None:
        raise RunError("the client pi-4 ended with exit code 31")

    stop = threading.Event()
    with watch([fail], stop) as raise_failure:
        assert stop.wait(10)
    with pytest.raises(RunError, match="pi-4"):
        raise_failure()
