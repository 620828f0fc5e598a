"""The export pool: identical requests run once, a failure affects its own request, results stay in the cache."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from export.export_cases import MLP, RESNET, largest, smallest, train_request
from safetensors.torch import save

from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.export import pool as pool_module
from subfleet.export.cache import CacheFolder
from subfleet.export.estimation.model import EstimateModel
from subfleet.export.jobs import write_atomically
from subfleet.export.pool import ExportPool
from subfleet.export.requests import EstimateRequest, EvaluateRequest, InferRequest
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import ExportError, FileError
from subfleet.protocol.programs import decode_program

pytestmark = [pytest.mark.export, pytest.mark.slow]
PATIENCE_S = 200.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[ExportPool]:
    with ExportPool(CacheFolder(path=folder), workers=1) as export_pool:
        yield export_pool


def test_identical_requests_at_the_same_time_run_once(pool: ExportPool, folder: Path) -> None:
    request = train_request("onnx")
    first, second = pool.submit(request), pool.submit(request)
    assert first is second
    path = first.result(PATIENCE_S)
    assert path == folder / request.file_name
    assert decode_program(path.read_bytes()).manifest.program_id == request.program_id


def test_a_written_program_is_found_by_another_pool(pool: ExportPool, folder: Path) -> None:
    path = pool.submit(train_request("onnx")).result(PATIENCE_S)
    before = path.stat().st_mtime_ns
    with ExportPool(CacheFolder(path=folder), workers=1) as other_pool:
        future = other_pool.submit(train_request("onnx"))
        assert future.done()
        assert future.result() == path
    assert path.stat().st_mtime_ns == before


def test_a_pool_on_a_cache_with_programs_starts_no_process_before_it_needs_one(pool: ExportPool, folder: Path) -> None:
    pool.submit(train_request("onnx")).result(PATIENCE_S)
    with ExportPool(CacheFolder(path=folder), workers=1) as lazy_pool:
        assert lazy_pool.submit(train_request("onnx")).done()
        time.sleep(0.2)  # an idle worker's thread would have started it by now
        assert lazy_pool.process_ids == (0,)
        lazy_pool.submit(train_request("onnx", batch_size=14))
        deadline = time.monotonic() + PATIENCE_S
        while lazy_pool.process_ids == (0,):  # closing ends the process before it has imported anything
            assert time.monotonic() < deadline, "no process was started"
            time.sleep(0.01)


def test_estimates_are_made_by_a_worker_and_stay(pool: ExportPool, folder: Path) -> None:
    request = EstimateRequest(training=train_request("onnx"))
    path = pool.submit(request).result(PATIENCE_S)
    assert path == folder / request.file_name
    network = network_of(request.training.model)
    here = EstimateModel(network, request.training).estimates
    full = [network.full_architecture()]
    assert MemoryEstimates.unpack(path.read_bytes()).memory_bytes(network, full) == here.memory_bytes(network, full)
    with ExportPool(CacheFolder(path=folder), workers=1) as other_pool:
        assert other_pool.submit(request).done()
    path.write_bytes(b"estimates")
    assert MemoryEstimates.unpack(pool.submit(request).result(PATIENCE_S).read_bytes()).pack()


def test_an_evaluation_is_written_once_and_stays(pool: ExportPool, folder: Path) -> None:
    train = train_request("onnx")
    request = EvaluateRequest(
        model=train.model, architecture=train.architecture, target="onnx", batch_size=4, objective=train.objective.plain
    )
    path = pool.submit(request).result(PATIENCE_S)
    assert path == folder / request.file_name
    manifest = decode_program(path.read_bytes()).manifest
    assert (manifest.purpose, manifest.program_id) == ("evaluate", request.program_id)
    with ExportPool(CacheFolder(path=folder), workers=1) as other_pool:
        assert other_pool.submit(request).done()


def test_a_damaged_result_is_exported_again(pool: ExportPool) -> None:
    path = pool.submit(train_request("onnx")).result(PATIENCE_S)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    again = decode_program(pool.submit(train_request("onnx")).result(PATIENCE_S).read_bytes())
    # The plan in the manifest contains measured memory, which varies by some kilobytes; the program is the same.
    assert bytes(again.body) == bytes(decode_program(whole).body)


def test_old_leftovers_are_removed_and_new_ones_are_left_alone(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.onnx.1234.part", tmp_path / ".b.onnx.5678.part"
    for leftover in (old, new):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    ExportPool(CacheFolder(path=tmp_path), workers=1).close()
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_models_with_their_weights(pool: ExportPool, tmp_path: Path, target: str) -> None:
    weights = save(init_state(network_of(MLP), 0))
    (tmp_path / "weights").write_bytes(weights)
    sha256 = BlobRef.of(weights).sha256
    request = InferRequest(model=MLP, architecture=largest(MLP), target=target, weights_sha256=sha256)
    path = pool.submit(request, weights_path=tmp_path / "weights").result(PATIENCE_S)
    assert path.name == request.file_name
    assert path.stat().st_size > 0


def test_weights_of_another_request_are_refused(pool: ExportPool, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(save({"x": torch.zeros(1)}))
    request = InferRequest(model=MLP, architecture=largest(MLP), target="onnx", weights_sha256="0" * 64)
    with pytest.raises(ExportError, match="differ from those of the request"):
        pool.submit(request, weights_path=tmp_path / "weights").result(PATIENCE_S)
    with pytest.raises(ExportError, match=r"FileNotFoundError|No such file"):
        pool.submit(request, weights_path=tmp_path / "absent").result(PATIENCE_S)


def test_a_killed_worker_costs_its_request_alone(pool: ExportPool) -> None:
    request = train_request("onnx", RESNET, batch_size=9)
    pool.submit(train_request("onnx", batch_size=8)).result(PATIENCE_S)
    future = pool.submit(request)
    time.sleep(0.2)  # until the worker has taken it
    os.kill(pool.process_ids[0], signal.SIGKILL)
    with pytest.raises(ExportError, match=r"ended before it answered; see .*worker-0\.log"):
        future.result(PATIENCE_S)
    assert pool.submit(request).result(PATIENCE_S).is_file()


def test_a_worker_killed_while_it_waits_costs_nothing(pool: ExportPool) -> None:
    pool.submit(train_request("onnx", batch_size=8)).result(PATIENCE_S)
    os.kill(pool.process_ids[0], signal.SIGKILL)
    assert pool.submit(train_request("onnx", batch_size=10)).result(PATIENCE_S).is_file()


def test_an_impossible_request_fails_with_its_own_error(pool: ExportPool) -> None:
    impossible = train_request("onnx", architecture=smallest(RESNET))  # axes of another network
    with pytest.raises(ExportError, match="axis"):
        pool.submit(impossible).result(PATIENCE_S)


def test_time_limit_and_closing(tmp_path: Path) -> None:
    with ExportPool(CacheFolder(path=tmp_path), workers=1, timeout_s=0.2) as limited_pool:
        with pytest.raises(ExportError, match=r"longer than 0\.2 s"):
            limited_pool.submit(train_request("onnx", RESNET)).result(PATIENCE_S)
        waiting = [limited_pool.submit(train_request("onnx", batch_size=size)) for size in (2, 3)]
    for future in waiting:
        assert isinstance(future.exception(PATIENCE_S), ExportError)
    with pytest.raises(ExportError, match="closed"):
        limited_pool.submit(train_request("onnx"))
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0.log"]


def test_another_worker_starts_where_a_job_waits_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "START_S", 0.5)
    with ExportPool(CacheFolder(path=tmp_path)) as export_pool:
        export_pool.submit(train_request("onnx")).result(PATIENCE_S)
        first, second = export_pool.process_ids
        assert first
        assert not second
        os.kill(first, signal.SIGSTOP)
        hanging = export_pool.submit(train_request("onnx", batch_size=11))
        assert export_pool.submit(train_request("onnx", batch_size=12)).result(PATIENCE_S).exists()
        assert export_pool.process_ids[1]
        os.kill(first, signal.SIGCONT)
        assert hanging.result(PATIENCE_S).exists()


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "import sys, os, time\nfrom pathlib import Path\n"
        "from subfleet.export.cache import CacheFolder\nfrom subfleet.export.pool import ExportPool\n"
        "pool = ExportPool(CacheFolder(path=Path(sys.argv[1])), workers=1)\n"
        "while not pool.process_ids[0]: time.sleep(0.01)\n"
        "print(pool.process_ids[0], flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    worker = Path(f"/proc/{int(process.stdout)}")
    deadline = time.monotonic() + PATIENCE_S
    while worker.exists() and "State:\tZ" not in (worker / "status").read_text():
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "a", b"first")

    def fail_with_full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail_with_full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers is 0"):
        ExportPool(CacheFolder(path=tmp_path), workers=0)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be created"):
        ExportPool(CacheFolder(path=tmp_path / "file"))
