"""What every test needs of the process that it runs in."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from matrices import SHORT_EXAMPLES

from subfleet.protocol.silence import silence

if TYPE_CHECKING:  # tests that export nothing load no exporter
    from subfleet.export.cache import CacheFolder
    from subfleet.export.pool import ExportPool


def pytest_configure() -> None:
    """Hear Ctrl-C again where a shell started us in the background, deaf to it; what tests start inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    silence(os.environ)  # tests import libraries themselves
    # Nothing timed is asserted, and a busy machine takes longer than any deadline.
    settings.register_profile("short", deadline=None, max_examples=SHORT_EXAMPLES, derandomize=True)
    settings.register_profile("thorough", deadline=None, max_examples=10 * SHORT_EXAMPLES)
    settings.load_profile("short")


def pytest_collection() -> None:
    """Look for no garbage while modules are loaded: what they make stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is loaded by now to itself: looking through millions of objects again and again takes minutes."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def cache() -> "CacheFolder":
    """Programs that all tests share; see `shared_programs`."""
    from shared_programs import folder_of_programs

    return folder_of_programs()


@pytest.fixture(scope="session")
def exports(cache: "CacheFolder") -> "Iterator[ExportPool]":
    """The exporter of emulated fleets, with the programs that all tests share."""
    from subfleet.export.pool import ExportPool

    with ExportPool(cache, workers=1, timeout_s=300.0) as opened:
        yield opened
