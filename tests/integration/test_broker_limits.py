"""A fleet of real sessions trains a round through brokers with limits."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from edge_client.fleet_rig import FixedMeter
from server.server_rig import Notes
from transport.mosquitto import free_port, mosquitto

from subfleet.agent.states import AgentSettings
from subfleet.device.describing import describe_device
from subfleet.device.runtimes import choose_trainer
from subfleet.device_profiles import load_profile
from subfleet.edge_client.session import Device, EdgeSession
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.elastic.families.records.residual import Mlp
from subfleet.export.pool import ExportPool
from subfleet.link.device_link import connect_devices
from subfleet.protocol.topics import Topics
from subfleet.protocol.training import TrainingSettings
from subfleet.serving.deployment import adapt_to_broker
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import Deadlines, LogClock
from subfleet.tasks import Dataset, write_npz
from subfleet.transport.address import mqtt_client_id, parse_url
from subfleet.transport.chunk_sizes import KNOWN_BROKERS, ChunkSizes, KnownBroker
from subfleet.transport.locking import LockingTransport, make_device_lock, make_server_lock
from subfleet.transport.mqtt import MqttTransport

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.export]

LIMIT_S = 60.0
RETRY_S = 0.2  # short, so that lost messages are soon requested again
TOPICS = Topics("main")


@dataclass(frozen=True, kw_only=True)
class Data:
    train: Path
    test: Path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    labels = np.arange(40) % 2
    inputs = generator.random((40, 64), dtype=np.float32) + labels[:, None].astype(np.float32)
    for name in ("train", "test"):
        write_npz(folder / f"{name}.npz", Dataset(inputs=inputs, labels=labels.astype(np.int64)))
    return Data(train=folder / "train.npz", test=folder / "test.npz")


def _create_run(data: Data) -> Run:
    """A run with weights of several chunks of the largest size."""
    return Run(
        name="narrow",
        model=Mlp(input_shape=(64,), class_count=2, widths=(256,), depths=(2,)),
        data=DataSettings(test=str(data.test)),
        rounds=1,
        min_clients=2,
        training=TrainingSettings(batch_size=20, learning_rate=0.01),
        rates=(1.0,),
        clock=LogClock(),
        deadlines=Deadlines(linger_s=0.0),
        deploy_targets=(),
    )


class Fleet:
    """A server and two devices that the test steps; everything is real except for their processes."""

    def __init__(self, folder: Path, url: str, data: Data, exports: ExportPool, *, tries_limits: bool) -> None:
        self.notes = Notes()
        self._stack = contextlib.ExitStack()
        address, run = parse_url(url), _create_run(data)
        mqtt = MqttTransport(address, mqtt_client_id("main", "server", run.name))
        self.known = KnownBroker(folder / KNOWN_BROKERS, address.host_and_port)
        self.sizes = ChunkSizes.from_broker(self.known)
        self.server = Server(
            run,
            connect_devices("main", LockingTransport(mqtt, make_server_lock(TOPICS, run.name)), sizes=self.sizes),
            self.notes,
            state_folder=folder / "server",
            exports=exports,
        )
        self._stack.callback(self.server.close)
        if tries_limits:
            adapt_to_broker(address, run, mqtt, self.sizes, self.notes)
        self.server.open()
        self.devices = [self._device(folder / name, name, url, data) for name in ("ada", "bob")]

    def _device(self, folder: Path, name: str, url: str, data: Data) -> EdgeSession:
        address = parse_url(url)
        trainer, summary = choose_trainer(["onnx"], str(data.train), "cpu")
        meter = FixedMeter(free_bytes=2 * 10**9)
        store = self._stack.enter_context(AgentStore.open(folder))
        worker = TrainingWorker(
            {trainer.target: trainer},
            blobs=store.blobs,
            work_folder=store.work_folder,
            data=str(data.train),
            held_out=None,
        )
        profile = describe_device(name, load_profile("laptop"), trainer.target, summary, meter)
        transport = MqttTransport(address, mqtt_client_id("main", "device", name))
        session = EdgeSession(
            AgentSettings(profile=profile, data_bytes=summary.data_bytes),
            LockingTransport(transport, make_device_lock(TOPICS, name)),
            TOPICS,
            Device(
                store=store,
                worker=worker,
                meter=meter,
                sizes=ChunkSizes.from_broker(KnownBroker(folder / KNOWN_BROKERS, address.host_and_port)),
            ),
            retry_s=RETRY_S,
        )
        session.open()
        self._stack.callback(session.close)
        return session

    def play(self) -> list[str]:
        """Play the round and return the status of each device."""
        until_s = time.monotonic() + LIMIT_S
        while not self.server.finished and time.monotonic() < until_s:
            for device in self.devices:
                device.turn(0.0)
            self.server.step(0.005)
        return [row.status for record in self.server.result().rounds for row in record.clients]

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def _open_fleet(
    folder: Path, settings: tuple[str, ...], data: Data, exports: ExportPool, *, tries_limits: bool = False
) -> Iterator[Fleet]:
    port = free_port()
    lines = (f"listener {port} 127.0.0.1", "allow_anonymous true", *settings)
    with mosquitto(folder, lines, port):
        fleet = Fleet(folder, f"mqtt://127.0.0.1:{port}", data, exports, tries_limits=tries_limits)
        with contextlib.closing(fleet):
            yield fleet


LIMITS = (
    ("message_size_limit 40000",),
    ("max_packet_size 20000",),
    ("max_qos 0", "retain_available false"),
    ("max_inflight_messages 1",),
    ("max_queued_messages 2",),
    ("max_keepalive 10", "persistence false", "max_connections 4"),
)
OTHERS = (("message_size_limit 65536",), ("retain_available false",))


@pytest.mark.parametrize(
    "settings", [*LIMITS, *(pytest.param(limits, marks=pytest.mark.long) for limits in OTHERS)], ids=" and ".join
)
def test_a_round_is_trained_through_a_broker_with_a_limit(
    tmp_path: Path, settings: tuple[str, ...], data: Data, exports: ExportPool
) -> None:
    with _open_fleet(tmp_path, settings, data, exports) as fleet:
        assert fleet.play() == ["aggregated", "aggregated"]


def test_devices_adapt_to_a_limit_that_the_server_found(tmp_path: Path, data: Data, exports: ExportPool) -> None:
    with _open_fleet(tmp_path, ("message_size_limit 9000",), data, exports, tries_limits=True) as fleet:
        assert fleet.sizes.chunk_bytes == fleet.known.chunk_bytes == 7_680
        assert fleet.play() == ["aggregated", "aggregated"]
        assert any("chunks: only sizes up to 7680 bytes are delivered" in message for message in fleet.notes.messages)
