"""A scripted server, a fake trainer and a real session, connected by the memory broker, with a manual clock."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from agent.agent_cases import EVALUATION, RESULT, announce, deploy_task, evaluate_task, profile, train_task

from subfleet.agent.states import AgentSettings
from subfleet.device.meters import Direction
from subfleet.edge_client.session import Device, EdgeSession
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.protocol.blobs import BlobRef, decode_chunk
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import DataSummary, Job, Prediction, TrainResult
from subfleet.protocol.messages import (
    Ack,
    BlobMissing,
    ChunkRequest,
    Deployed,
    Evaluated,
    Message,
    Refusal,
    RoundInfo,
    Task,
    Telemetry,
    Update,
    decode,
    encode,
)
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Reading
from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.protocol.topics import CHUNK, Topics
from subfleet.transport.base import Connected, Delivery
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.exchange import BlobExchange, Fetched
from subfleet.transport.in_memory import Faults, MemoryBroker, MemoryTransport
from subfleet.transport.outbox import Outbox

PROGRAM = b"program" * 50_000  # six chunks
WEIGHTS = b"weights" * 30_000  # four chunks
DATA_BYTES = 480


@dataclass
class ManualClock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeTrainer:
    """Writes its inputs to its output, so that the server can check them. It waits until `gate` is set."""

    target: ClassVar[str] = "fake"
    suffix: ClassVar[str] = ".fake"
    providers: ClassVar[tuple[str, ...]] = ("cpu",)
    held_bytes: int = 0
    jobs: list[Job[Train]] = field(default_factory=list)
    evaluations: list[Job[Evaluate]] = field(default_factory=list)
    error: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def describe_runtime(self) -> str:
        return "a test's"

    def describe(self, data: str) -> DataSummary:
        raise NotImplementedError

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        self.jobs.append(job)
        while not self.gate.wait(0.005):
            if stopped():
                raise RuntimeError("stopped")
        if self.error is not None:
            raise self.error
        job.output_path.write_bytes(fake_update(job.program_path.read_bytes(), job.weights_path.read_bytes()))
        return RESULT

    def calibrate(self, job: Job[Calibrate], stopped: Callable[[], bool]) -> TrainResult:
        raise NotImplementedError

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        raise NotImplementedError

    def evaluate(self, job: Job[Evaluate], stopped: Callable[[], bool]) -> EvaluationResult:
        self.evaluations.append(job)
        while not self.gate.wait(0.005):
            if stopped():
                raise RuntimeError("stopped")
        if self.error is not None:
            raise self.error
        assert job.program_path.read_bytes() == PROGRAM
        return EVALUATION

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        raise NotImplementedError


def fake_update(program: bytes, weights: bytes) -> bytes:
    """The update that the fake trainer writes for its inputs."""
    return b"trained:" + program[:7] + weights


@dataclass
class FixedMeter:
    """Always reads the same free memory; records the times that it is read at."""

    free_bytes: int = 2480  # of these, DATA_BYTES are for the samples
    log_times: list[float | None] = field(default_factory=list)

    def read(self, log_time_s: float | None) -> tuple[float | None, Reading]:
        self.log_times.append(log_time_s)
        return log_time_s, Reading(memory_free_bytes=self.free_bytes)

    def low(self, quantile: float) -> Reading | None:
        return None

    def note_transfer(self, direction: Direction, size_bytes: int, now_s: float) -> None:
        pass


class FakeServer:
    """Plays the server's part of the protocol: announce, assign the task, fetch the update, deploy, finish.

    `hold` names the kinds of messages that it does not acknowledge, like a slow server.
    """

    def __init__(self, broker: MemoryBroker, folder: Path, clock: ManualClock) -> None:
        self._clock = clock
        self._topics = Topics()
        self._link = broker.client("server")
        self.blobs = BlobStore(folder / "server")
        down = self._topics.downlink
        self._exchange = BlobExchange(
            self.blobs,
            request_topic=lambda peer: down(peer, ChunkRequest.KIND),
            chunk_topic=lambda peer: down(peer, CHUNK),
            missing_topic=lambda peer: down(peer, BlobMissing.KIND),
        )
        self._outbox = Outbox(2.0)
        self.info: RoundInfo | None = None
        self.task: Task | None = None
        self.deadline_s = 60.0
        self.heard: list[Message] = []
        self.hold: set[str] = set()
        self.updates: dict[str, Update] = {}  # by task
        self._offered: dict[str, Update] = {}
        self._published_at_s = clock()
        self._link.open((self._topics.uplink("+", "+"),))

    def train_task(self, name: str = "t1", number: int = 1) -> Task:
        """A training task; its blobs are in the store."""
        program, weights = self.blobs.add(PROGRAM), self.blobs.add(WEIGHTS + name.encode())
        ref = ProgramRef(program_id="p", target="fake", blob=program)
        # On a link that loses a third of all messages in each direction, fetches are repeated at growing intervals.
        return train_task(name, number, weights=weights, program=ref, deadline_s=self.deadline_s)

    def evaluate_task(self, name: str = "e1", number: int = 1) -> Task:
        """An evaluation task; its blobs are in the store."""
        template = self.train_task(name, number)
        (program,), (weights,) = template.programs, template.weights
        return evaluate_task(name, number, weights=weights, program=program, deadline_s=self.deadline_s)

    def deploy_task(self) -> Task:
        for program in deploy_task().programs:
            self.blobs.add(f"model {program.target}".encode())
        return deploy_task()

    def announce(self, info: RoundInfo) -> None:
        self.info = info
        self._publish_state()

    def assign(self, task: Task) -> None:
        self.task = task
        self._outbox.put(task.message_id, self._topics.downlink("pi", task.KIND), encode(task), retain=True)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.heard if isinstance(message, kind)]

    def turn(self) -> None:
        while (event := self._link.poll(0)) is not None:
            if isinstance(event, Connected):
                self._publish_state()
            elif isinstance(event, Delivery):
                self._on_delivery(event)
        for result in self._exchange.take_results():
            if isinstance(result, Fetched):
                self._store(result.ref)
        if self._clock() - self._published_at_s >= 2.0:
            self._published_at_s = self._clock()
            self._publish_state()
        for outgoing in (*self._outbox.list_due(self._clock()), *self._exchange.tick(self._clock())):
            self._link.publish(outgoing.topic, outgoing.payload, retain=outgoing.retain)

    def _publish_state(self) -> None:
        if self.info is not None:
            self._link.publish(self._topics.all(self.info.KIND), encode(self.info), retain=True)

    def _on_delivery(self, event: Delivery) -> None:
        address = self._topics.parse(event.topic)
        if address.kind == CHUNK:
            self._exchange.handle_chunk("pi", decode_chunk(event.payload))
            return
        message = decode(event.payload, expected=address.kind)
        self.heard.append(message)
        if isinstance(message, ChunkRequest):
            self._exchange.handle_request("pi", message)
        elif isinstance(message, Ack):
            self._outbox.settle(message.of)
        elif isinstance(message, Update):
            self._on_update(message)
        elif isinstance(message, (Refusal, Deployed, Evaluated)) or (isinstance(message, Telemetry) and message.run_id):
            self._ack(message.KIND, message.message_id, "accepted")

    def _on_update(self, update: Update) -> None:
        if update.task_id in self.updates:
            self._ack(update.KIND, update.message_id, "duplicate")
        else:
            self._offered[update.blob.sha256] = update
            self._exchange.fetch("pi", update.blob)

    def _store(self, ref: BlobRef) -> None:
        update = self._offered.pop(ref.sha256, None)
        if update is None:  # a repeated offer, with its blob fetched twice
            return
        assert update.task_id not in self.updates, "an update is stored once"
        self.updates[update.task_id] = update
        self._ack(update.KIND, update.message_id, "accepted")

    def _ack(self, kind: str, of: str, status: str) -> None:
        if kind not in self.hold:
            ack = Ack(of=of, status=status)  # type: ignore[arg-type]  # one of its Literals
            self._link.publish(self._topics.downlink("pi", ack.KIND), encode(ack))


class Rig:
    """A server and a device; `start` and `kill` switch the device on and off; `free_bytes` are free on its disk."""

    def __init__(self, folder: Path, faults: Faults | None = None, *, disk_limit_bytes: int | None = None) -> None:
        self.free_bytes = 10**10
        self.disk_limit_bytes = disk_limit_bytes
        self.folder = folder
        self.clock = ManualClock()
        self.broker = MemoryBroker(faults, clock=self.clock)
        self.server = FakeServer(self.broker, folder, self.clock)
        if faults is not None:
            self.server.deadline_s = 1000.0
        self.trainer = FakeTrainer()
        self.meter = FixedMeter()
        self.starts = 0
        self.max_training_bytes: int | None = None
        self.start()

    def start(self, *, leave_when_finished: bool = False) -> None:
        self.starts += 1
        self.store = AgentStore(self.folder / "device", self.disk_limit_bytes, free_bytes=lambda _: self.free_bytes)
        self.store.work_folder.mkdir(exist_ok=True)
        self.worker = TrainingWorker(
            {"fake": self.trainer},
            blobs=self.store.blobs,
            work_folder=self.store.work_folder,
            data="d",
            held_out="h",
        )
        declared = replace(profile(f"s{self.starts}"), max_training_bytes=self.max_training_bytes)
        settings = AgentSettings(profile=declared, data_bytes=DATA_BYTES, leave_when_finished=leave_when_finished)
        self.link: MemoryTransport = self.broker.client("pi")
        device = Device(store=self.store, worker=self.worker, meter=self.meter)
        self.session = EdgeSession(settings, self.link, Topics(), device, clock=self.clock)
        self.session.open()

    def kill(self) -> None:
        """End the device without a goodbye; wait for its training thread, which would die with a real process."""
        self.link.drop_link()
        self.worker.stop()
        self.worker.join(5.0)

    def until(self, done: Callable[[], bool], *, seconds: float = 1000.0) -> None:
        """Let both sides work, and time pass, until a condition holds."""
        end_s = self.clock.now_s + seconds
        while not done():
            assert self.clock.now_s < end_s, "the condition does not hold in time"
            time.sleep(0.0005)  # the training thread works in real time, also on a busy machine
            self.turn()

    def turn(self) -> None:
        self.server.turn()
        self.session.turn(0)
        if self.trainer.gate.is_set():
            self.worker.join(1.0)
        self.clock.now_s += 0.05

    def play_round(self, number: int = 1, name: str = "t1") -> None:
        """Play a whole round, from the announcement to the stored update."""
        self.server.announce(announce(number))
        self.until(lambda: any(telemetry.round == number for telemetry in self.server.of(Telemetry)))  # type: ignore[union-attr]  # of() filtered them
        self.server.announce(announce(number, "train"))
        self.server.assign(self.server.train_task(name, number))
        self.until(lambda: name in self.server.updates)
