"""The server as a process, killed without warning; and the server with real exports and real agents."""

import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from server.fake_device import Device
from server.server_rig import Notes, World, config, fleet

from subfleet.device_profiles import find_demo_log
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.export.pool import ExportPool
from subfleet.link.broker import EmbeddedBroker
from subfleet.link.device_link import connect_devices
from subfleet.protocol.training import TrainingSettings
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import LogClock
from subfleet.tasks import Dataset, write_npz
from subfleet.transport.address import parse_url
from subfleet.transport.mqtt import MqttTransport

pytestmark = [pytest.mark.slow, pytest.mark.broker]

TESTS = Path(__file__).parent.parent
LIMIT_S = 120.0


@pytest.fixture
def url() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.url


def _start_server(url: str, folder: Path) -> "subprocess.Popen[str]":
    paths = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(TESTS / "server" / "serve_fakes.py"), url, str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_server_process_ends_with_the_same_bits(tmp_path: Path, url: str) -> None:
    calm = World(tmp_path / "calm", config(rounds=4), fleet())
    calm.run()
    devices = [
        Device(name, MqttTransport(parse_url(url), name), tmp_path / "devices", time.monotonic, behaviour)
        for name, behaviour in fleet().items()
    ]
    for device in devices:
        device.open()
    generator, kills = random.Random(1), 0
    server = _start_server(url, tmp_path / "hurt")
    task_count, kill_at_s, limit_s = 0, math.inf, time.monotonic() + LIMIT_S
    try:
        while server.poll() is None and time.monotonic() < limit_s:
            for device in devices:
                device.step()
            time.sleep(0.01)
            if kills < 2 and kill_at_s == math.inf and task_count < (task_count := _count_tasks(devices)):
                kill_at_s = time.monotonic() + generator.uniform(0.0, 0.2)
            if time.monotonic() >= kill_at_s:
                server.kill()
                server.communicate()
                kills += 1
                server = _start_server(url, tmp_path / "hurt")
                task_count, kill_at_s = _count_tasks(devices), math.inf
        output, _ = server.communicate(timeout=10)
    finally:
        server.kill()
        for device in devices:
            device.transport.close()
    assert server.returncode == 0
    assert kills >= 1
    assert Path(output.strip()).read_bytes() == calm.model_bytes()


def _count_tasks(devices: list[Device]) -> int:
    return sum(len(device.tasks) for device in devices)


def _samples(count: int, seed: int) -> Dataset:
    """Two classes that a small network can tell apart: which half of the picture is brighter."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    inputs = generator.random((count, 1, 8, 8), dtype=np.float32)
    inputs[labels == 1, :, :4] += 1.0
    inputs[labels == 0, :, 4:] += 1.0
    return Dataset(inputs=inputs / np.float32(2), labels=labels.astype(np.int64))


@pytest.mark.export
def test_real_agents_train_real_programs(tmp_path: Path, url: str, exports: ExportPool) -> None:
    write_npz(tmp_path / "test.npz", _samples(200, 0))
    for index, name in enumerate(("jetson", "laptop")):
        write_npz(tmp_path / f"{name}.npz", _samples(80, index + 1))
    settings = Run(
        name="real",
        model=PreactResNet(input_shape=(1, 8, 8), class_count=2, widths=(8,), depths=(2,), group_size=4),
        data=DataSettings(test=str(tmp_path / "test.npz")),
        rounds=2,
        min_clients=2,
        training=TrainingSettings(epochs=2, batch_size=16, learning_rate=0.1),
        rates=(0.5, 1.0),
        clock=LogClock(),
    )
    notes = Notes()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(_join(url, tmp_path, name, profile))
            for name, profile in (("jetson", "jetson_orin_nano"), ("laptop", "laptop"))
        ]
        transport = MqttTransport(parse_url(url), "server")
        server = Server(
            settings, connect_devices("main", transport), notes, state_folder=tmp_path / "state", exports=exports
        )
        result = server.run(threading.Event())
        for client in clients:
            client.wait(timeout=30)
            assert client.returncode == 0
    assert result.finished
    assert [row.status for record in result.rounds for row in record.clients] == ["aggregated"] * 4
    assert (result.accuracy or 0) > 0.9
    rows = [row for record in result.rounds for row in record.clients]
    assert all((row.measured_peak_bytes or 0) > 0 and 0 < row.planned_peak_bytes <= row.budget_bytes for row in rows)
    assert {(model.client_id, model.target, model.status) for model in result.deployed} == {
        (name, target, "deployed") for name in ("jetson", "laptop") for target in ("onnx", "executorch")
    }


class _join:  # noqa: N801 - read as a verb
    """A client process as a context."""

    def __init__(self, url: str, folder: Path, name: str, profile: str) -> None:
        self._command = [
            *(sys.executable, "-m", "subfleet.edge_client.cli", "join", url, "--id", name),
            *("--data", str(folder / f"{name}.npz"), "--profile", profile, "--state", str(folder / name)),
            *("--replay", str(find_demo_log(profile)), "--runtime", "onnx", "--leave-when-finished"),
        ]

    def __enter__(self) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(self._command)
        return self._process

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
