"""The cache folder of exports: damaged results are ignored, the least recently used go first, one process writes."""

import os
import threading
import time
from pathlib import Path

import pytest
from export.export_cases import train_request

from subfleet.export.cache import RECENT_S, CacheFolder, ExportCache, lock_result
from subfleet.export.requests import TrainRequest
from subfleet.protocol.errors import FileError
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import Program, ProgramManifest, encode_program


def request_of(batch_size: int) -> TrainRequest:
    return train_request("onnx", batch_size=batch_size)


def put(cache: ExportCache, request: TrainRequest, *, idle_s: float = 0.0, body_bytes: int = 1000) -> Path:
    manifest = ProgramManifest(
        program_id=request.program_id,
        target="onnx",
        purpose="train",
        batch_size=request.batch_size,
        inputs=(),
        outputs=(),
        memory=MemoryPlan(runtime_bytes=1),
        max_abs_diff=0.0,
    )
    path = cache.path(request)
    path.write_bytes(encode_program(Program(manifest=manifest, body=bytes(body_bytes))))
    os.utime(path, (time.time() - idle_s, time.time() - 10 * idle_s))
    return path


def test_whole_results_of_the_very_request_are_found(tmp_path: Path) -> None:
    cache = ExportCache(CacheFolder(path=tmp_path))
    assert cache.find(request_of(2)) is None
    path = put(cache, request_of(2))
    assert cache.find(request_of(2)) == path
    path.rename(cache.path(request_of(3)))
    assert cache.find(request_of(2)) is None
    assert cache.find(request_of(3)) is None


@pytest.mark.parametrize("kept_bytes", [0, 5, 500])
def test_a_damaged_result_is_not_found_even_after_it_was(tmp_path: Path, kept_bytes: int) -> None:
    cache = ExportCache(CacheFolder(path=tmp_path))
    path = put(cache, request_of(2))
    assert cache.find(request_of(2)) == path
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert cache.find(request_of(2)) is None


def test_the_least_recently_used_results_go_first(tmp_path: Path) -> None:
    cache = ExportCache(CacheFolder(path=tmp_path))
    oldest, used, fresh = (
        put(cache, request_of(size), idle_s=idle_s) for size, idle_s in ((2, 9000), (3, 8000), (4, 2 * RECENT_S))
    )
    assert cache.find(request_of(2)) == oldest  # now the most recently used
    result_bytes = oldest.stat().st_size
    ExportCache(CacheFolder(path=tmp_path, limit_bytes=2 * result_bytes))
    assert oldest.exists()
    assert fresh.exists()
    assert not used.exists()


def test_recently_used_results_stay_whatever_the_limit(tmp_path: Path) -> None:
    path = put(ExportCache(CacheFolder(path=tmp_path)), request_of(2))
    assert ExportCache(CacheFolder(path=tmp_path, limit_bytes=1)).find(request_of(2)) == path


def test_other_files_are_not_counted_and_not_removed(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_bytes(bytes(5000))
    os.utime(log, (0, 0))
    ExportCache(CacheFolder(path=tmp_path, limit_bytes=1))
    assert log.exists()


def test_a_wrong_limit_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit_bytes is 0"):
        CacheFolder(path=tmp_path, limit_bytes=0)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be created"):
        ExportCache(CacheFolder(path=tmp_path / "file"))


@pytest.mark.slow
def test_one_holder_at_a_time_writes_a_result(tmp_path: Path) -> None:
    path, order = tmp_path / "ab.program", []

    def write_second() -> None:
        with lock_result(path):
            order.append("second")

    with lock_result(path):
        waiting = threading.Thread(target=write_second)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
