"""Garbage collection is paused while graphs are built, and only then."""

import gc
from collections.abc import Iterator

import pytest

from subfleet.export.tools import pause_garbage_collection


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


def test_nothing_is_collected_until_the_work_is_done() -> None:
    with pause_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_does_not_leave_it_off() -> None:
    with pytest.raises(KeyError), pause_garbage_collection():
        raise KeyError
    assert gc.isenabled()


def test_work_within_work_does_not_turn_it_on_too_early() -> None:
    with pause_garbage_collection():
        with pause_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    with pause_garbage_collection():
        pass
    assert not gc.isenabled()
