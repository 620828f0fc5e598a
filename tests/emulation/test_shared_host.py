"""Loaded programs that all clients of a fleet share."""

from dataclasses import dataclass
from typing import Any

import pytest

from subfleet.emulation.batch.trainers import SharedHost, create_trainers
from subfleet.protocol.errors import ConfigError
from subfleet.trainers.loaded import Loaded


@dataclass(frozen=True)
class Placeholder:
    """A placeholder for a session and its layout."""


def make_loaded(sha256: str, threads: int = 1) -> Loaded:
    placeholder: Any = Placeholder()
    return Loaded(sha256=sha256, target="onnx", threads=threads, layout=placeholder, programs=placeholder)


def test_a_session_serves_the_next_job_of_its_program_and_threads() -> None:
    host = SharedHost()
    first, second = make_loaded("a"), make_loaded("b")
    for session in (first, second):
        host.keep(session, held_bytes=10**9, limit_bytes=1)  # its memory counts for no client
    assert host.take("a", 2) is None
    reused = host.take("a", 1)
    assert reused is not None
    assert (reused.loaded is first, reused.held_bytes) == (True, 0)
    assert host.take("a", 1) is None, "it is in use"
    assert host.take("b", 1) is not None


def test_the_least_recently_used_session_is_dropped_first() -> None:
    host = SharedHost(most=2)
    for name in ("a", "b"):
        host.keep(make_loaded(name), held_bytes=0, limit_bytes=1)
    reused = host.take("a", 1)
    assert reused is not None
    host.keep(reused.loaded, held_bytes=0, limit_bytes=1)
    host.keep(make_loaded("c"), held_bytes=0, limit_bytes=1)
    assert host.take("b", 1) is None
    assert host.take("a", 1) is not None
    assert host.take("c", 1) is not None


def test_memory_and_time_are_not_measured() -> None:
    watch = SharedHost().watch(0, held_bytes=5)
    held = bytearray(2**24)
    watch.check()
    assert (len(held), watch.growth_bytes(), watch.measure_held_bytes()) == (2**24, 0, 0)
    assert SharedHost().now_s() == SharedHost().now_s()


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(ConfigError, match="clients run tflite"):
        create_trainers({"onnx", "tflite"})
