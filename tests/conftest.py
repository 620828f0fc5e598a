"""Settings of the test process, and fixtures that all tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from matrices import SHORT_EXAMPLES

from subfleet.protocol.silence import silence

if TYPE_CHECKING:  # tests without exports do not load the exporter
    from subfleet.export.cache import CacheFolder
    from subfleet.export.pool import ExportPool


def pytest_configure() -> None:
    """Handle Ctrl-C although a shell that starts a job in the background ignores it; child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    silence(os.environ)  # tests import these libraries themselves
    # No deadlines: no test asserts a time, and a busy machine may take any time.
    settings.register_profile("short", deadline=None, max_examples=SHORT_EXAMPLES, derandomize=True)
    settings.register_profile("thorough", deadline=None, max_examples=10 * SHORT_EXAMPLES)
    settings.load_profile("short")


def pytest_collection() -> None:
    """Collect no garbage while modules are imported: their objects stay."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with whole runs: they mostly wait, for links as slow as real ones, while other tests compute."""
    items.sort(key=lambda item: "integration" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Exempt the imported objects from garbage collection: to scan millions of them repeatedly takes minutes."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # exports make many objects and hardly any cycles
    gc.enable()


def pytest_sessionfinish() -> None:
    """Collect once: pytest does it ten times more, which takes seconds with all that tests have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cache() -> "CacheFolder":
    """The folder of the programs that all tests share; see `shared_programs`."""
    from shared_programs import folder_of_programs

    return folder_of_programs()


@pytest.fixture(scope="session")
def exports(cache: "CacheFolder") -> "Iterator[ExportPool]":
    """The exporter of emulated fleets, with the programs that all tests share."""
    from subfleet.export.pool import ExportPool

    with ExportPool(cache, workers=1, timeout_s=300.0) as pool:
        yield pool
