"""Fakes around a real server: an exporter without programs, devices without trainers, time that tests move."""

import hashlib
import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.elastic.network import ModelConfig
from subfleet.export.requests import InferRequest, TrainRequest
from subfleet.protocol.blobs import BlobRef, decode_chunk
from subfleet.protocol.errors import ExportError
from subfleet.protocol.messages import (
    BlobMissing,
    ChunkRequest,
    Deployed,
    Message,
    Presence,
    Profile,
    Receipt,
    Refusal,
    RoundInfo,
    Task,
    Telemetry,
    Update,
    decode,
    encode,
)
from subfleet.protocol.programs import Program, ProgramManifest, TrainingSettings, encode_program
from subfleet.protocol.readings import Reading
from subfleet.protocol.topics import CHUNK, Topics
from subfleet.server.config import Deadlines, LogClock, ServerConfig
from subfleet.server.records import RoundRecord
from subfleet.server.session import Server
from subfleet.transport.base import Connected, Delivery, Transport
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.exchange import BlobExchange, Fetched
from subfleet.transport.memory import FaultPlan, MemoryBroker
from subfleet.transport.outbox import Outbox

SHAPE = (6,)
CLASSES = 3
MODEL = ModelConfig(family="mlp", input_shape=SHAPE, class_count=CLASSES, widths=(8, 8), depths=(2, 1), group_size=4)
PLENTY_BYTES = 10**9


def evaluation() -> tuple[Any, Any]:
    """The data set that configurations of these tests name as an entry point."""
    generator = np.random.default_rng(5)
    return generator.random((30, *SHAPE), dtype=np.float32), generator.integers(0, CLASSES, 30)


def config(**changes: Any) -> ServerConfig:
    """A small run with a logical clock and every deadline far away."""
    settings: dict[str, Any] = {
        "name": "test",
        "model": MODEL,
        "evaluation_data": "server.server_rig:evaluation",
        "rounds": 2,
        "min_clients": 3,
        "training": TrainingSettings(batch_size=4),
        "rates": (0.5, 1.0),
        "clock": LogClock(start_s=0.0, step_s=10.0),
        "deadlines": Deadlines(join_s=1e4, measure_s=1e4, round_s=1e4, deploy_s=1e4, lease_s=1e4, linger_s=0.0),
        "deploy_targets": ("onnx",),
        "memory_overhead_bytes": {},
    }
    return ServerConfig(**{**settings, **changes})


class HandClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Notes:
    """An observer that remembers."""

    said: list[str] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)

    def round_finished(self, record: RoundRecord) -> None:
        self.records.append(record)


class FakeExports:
    """Writes programs whose planned peak a function of the request gives."""

    def __init__(self, folder: Path, planned: Callable[[TrainRequest], int] = lambda _: 1000) -> None:
        self.folder = folder
        self.planned = planned
        self.requests: list[TrainRequest | InferRequest] = []
        folder.mkdir(parents=True, exist_ok=True)

    def submit_training(self, request: TrainRequest) -> "Future[Path]":
        self.requests.append(request)
        future: Future[Path] = Future()
        try:
            planned_bytes = self.planned(request)
        except ExportError as error:
            future.set_exception(error)
            return future
        manifest = ProgramManifest(
            program_id=request.program_id,
            target=request.target,
            purpose="train",
            batch_size=request.batch_size,
            inputs=(),
            outputs=(),
            planned_peak_bytes=planned_bytes,
            max_abs_diff=0.0,
        )
        path = self.folder / f"{request.program_id}.program"
        path.write_bytes(encode_program(Program(manifest=manifest, body=request.spec.spec_id.encode())))
        future.set_result(path)
        return future

    def submit_inference(self, request: InferRequest, weights_path: Path) -> "Future[Path]":
        self.requests.append(request)
        path = self.folder / f"{request.program_id}.{request.target}"
        path.write_bytes(b"model " + request.spec.spec_id.encode() + weights_path.read_bytes())
        future: Future[Path] = Future()
        future.set_result(path)
        return future


def small_change(weights: Mapping[str, Any], client_id: str, round_number: int, scale: float) -> dict[str, Any]:
    """What a fake device learns: a function of its weights, its name and the round alone."""
    digest = hashlib.sha256(f"{client_id}/{round_number}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return {
        name: (scale * (generator.random(array.shape) - 0.5) - 0.1 * scale * array).astype(np.float32)
        for name, array in sorted(weights.items())
    }


@dataclass(kw_only=True)
class Behaviour:
    """How a fake device answers."""

    memory_budget_bytes: Callable[[int], int] = lambda _: PLENTY_BYTES
    reading: Callable[[int], Reading] = lambda _: Reading(memory_free_bytes=PLENTY_BYTES)
    refuse: Callable[[Task], tuple[str, int | None] | None] = lambda _: None
    change: Callable[[Mapping[str, Any], Task], dict[str, Any]] | None = None
    sample_count: int = 10
    runtimes: tuple[str, ...] = ("onnx",)
    input_shape: tuple[int, ...] = SHAPE
    scale: float = 0.1


class Device:
    """A client that does what the agent does, without a trainer."""

    def __init__(
        self, client_id: str, transport: Transport, folder: Path, clock: Callable[[], float], behaviour: Behaviour
    ) -> None:
        self.client_id = client_id
        self.session_id = f"{client_id}-1"
        self.behaviour = behaviour
        self.topics = Topics("main")
        self.clock = clock
        self.transport = transport
        self.store = BlobStore(folder / client_id)
        self.exchange = BlobExchange(
            self.store,
            request_topic=lambda _: self.topics.up(client_id, "request"),
            chunk_topic=lambda _: self.topics.up(client_id, "chunk"),
            missing_topic=lambda _: self.topics.up(client_id, "missing"),
        )
        self.outbox = Outbox()
        self.task: Task | None = None
        self.lacking: set[str] = set()
        self.done: set[str] = set()
        self.rounds: list[RoundInfo] = []
        self.tasks: list[Task] = []
        self.receipts: dict[str, Receipt] = {}
        self.heartbeat_s = -1e9

    def open(self) -> None:
        self.transport.open((self.topics.all("round"), self.topics.down(self.client_id, "+")))

    def send(self, message: Message, *, retain: bool = False) -> None:
        self.transport.publish(self.topics.up(self.client_id, message.KIND), encode(message), retain=retain)

    def keep(self, message: Telemetry | Update | Refusal | Deployed) -> None:
        self.outbox.put(message.message_id, self.topics.up(self.client_id, message.KIND), encode(message))

    def profile(self) -> Profile:
        return Profile(
            client_id=self.client_id,
            session_id=self.session_id,
            device="fake",
            runtimes=self.behaviour.runtimes,
            sample_count=self.behaviour.sample_count,
            class_counts=(1,) * CLASSES,
            input_shape=self.behaviour.input_shape,
            memory_total_bytes=PLENTY_BYTES,
            memory_share=1.0,
        )

    def step(self) -> None:
        if self.clock() - self.heartbeat_s >= 5.0:
            self.heartbeat_s = self.clock()
            self.send(Presence(client_id=self.client_id, session_id=self.session_id, online=True), retain=True)
            self.send(self.profile(), retain=True)
        while (event := self.transport.poll(0.0)) is not None:
            if isinstance(event, Connected):
                self.heartbeat_s = -1e9
                self.exchange.reconnected()
                self.outbox.resend_all()
            elif isinstance(event, Delivery):
                self._delivered(event)
        for result in self.exchange.finished():
            if isinstance(result, Fetched):
                self.lacking.discard(result.ref.sha256)
        self._work()
        for outgoing in (*self.exchange.tick(self.clock()), *self.outbox.due(self.clock())):
            self.transport.publish(outgoing.topic, outgoing.payload, retain=outgoing.retain)

    def _delivered(self, event: Delivery) -> None:
        if event.topic.endswith(f"/{CHUNK}"):
            self.exchange.handle_chunk("server", decode_chunk(event.payload))
            return
        message = decode(event.payload)
        if isinstance(message, RoundInfo):
            self.rounds.append(message)
            self._announced(message)
        elif isinstance(message, Task):
            self._given(message)
        elif isinstance(message, Receipt):
            self.receipts[message.of] = message
            self.outbox.settle(message.of)
        elif isinstance(message, ChunkRequest):
            self.exchange.handle_request("server", message)
        elif isinstance(message, BlobMissing):
            self.exchange.handle_missing("server", message)

    def _announced(self, info: RoundInfo) -> None:
        if info.phase != "measure":
            return
        self.keep(
            Telemetry(
                client_id=self.client_id,
                session_id=self.session_id,
                run_id=info.run_id,
                round=info.round,
                log_time_s=info.log_time_s,
                reading=self.behaviour.reading(info.round),
                memory_budget_bytes=self.behaviour.memory_budget_bytes(info.round),
                message_id=f"telemetry/{info.run_id}/{info.round}/{self.client_id}",
            )
        )

    def _given(self, task: Task) -> None:
        self.send(Receipt(of=task.message_id, status="accepted"))
        if task.task_id in self.done or (self.task is not None and self.task.task_id == task.task_id):
            return
        self.tasks.append(task)
        refusal = self.behaviour.refuse(task)
        if refusal is not None:
            self.done.add(task.task_id)
            reason: Any = refusal[0]
            self.keep(
                Refusal(
                    task_id=task.task_id,
                    run_id=task.run_id,
                    round=task.round,
                    client_id=self.client_id,
                    reason=reason,
                    detail="as told",
                    available_bytes=refusal[1],
                )
            )
            return
        self.task = task
        blobs = [program.blob for program in task.programs] + ([task.weights] if task.weights else [])
        self.lacking = {blob.sha256 for blob in blobs}
        for blob in blobs:
            self.exchange.fetch("server", blob)

    def _work(self) -> None:
        task = self.task
        if task is None or self.lacking:
            return
        self.task = None
        self.done.add(task.task_id)
        if task.work == "deploy":
            self.keep(
                Deployed(
                    task_id=task.task_id,
                    run_id=task.run_id,
                    client_id=self.client_id,
                    files=tuple(f"model.{program.target}" for program in task.programs),
                )
            )
            return
        self.keep(self.update_for(task, self.store.add(encode_arrays(self._learned(task)))))

    def _learned(self, task: Task) -> dict[str, Any]:
        assert task.weights is not None
        weights = decode_arrays(self.store.path(task.weights).read_bytes())
        if self.behaviour.change is not None:
            return self.behaviour.change(weights, task)
        return small_change(weights, self.client_id, task.round, self.behaviour.scale)

    def update_for(self, task: Task, blob: BlobRef) -> Update:
        return Update(
            task_id=task.task_id,
            run_id=task.run_id,
            round=task.round,
            client_id=self.client_id,
            blob=blob,
            sample_count=self.behaviour.sample_count,
            step_count=1,
            loss=1.0,
            accuracy=0.5,
            measured_peak_bytes=900,
            train_seconds=0.1,
            seconds=0.2,
            message_id=f"update/{task.task_id}",
        )


class World:
    """A broker, a server and devices in one thread, with time that the test moves."""

    def __init__(
        self,
        folder: Path,
        settings: ServerConfig,
        devices: Mapping[str, Behaviour],
        *,
        faults: FaultPlan | None = None,
        planned: Callable[[TrainRequest], int] = lambda _: 1000,
        order: int = 0,
    ) -> None:
        self.clock = HandClock()
        self.folder = folder
        self.settings = settings
        self.broker = MemoryBroker(faults, clock=self.clock)
        self.notes = Notes()
        self.exports = FakeExports(folder / "exports", planned)
        self.order = random.Random(order)
        self.devices = {
            name: Device(name, self.broker.client(name), folder / "devices", self.clock, behaviour)
            for name, behaviour in devices.items()
        }
        self.server = self.new_server()
        self.server.open()
        for device in self.devices.values():
            device.open()

    def new_server(self) -> Server:
        return Server(
            self.settings,
            self.broker.client("server"),
            self.notes,
            state_folder=self.folder / "state",
            exports=self.exports,
            clock=self.clock,
        )

    def kill_server(self) -> None:
        """Drop the server as a kill does: nothing is closed properly but its link, which the broker cuts."""
        self.server = self.new_server()
        self.server.open()

    def turn(self, seconds: float = 0.25) -> None:
        """A little time passes; everybody takes one step, in a drawn order."""
        self.clock.now_s += seconds
        names = sorted(self.devices)
        self.order.shuffle(names)
        for name in names:
            self.devices[name].step()
        # Real time: the folding thread has to get its turn.
        self.server.step(0.0)
        work = self.server._workbench._work
        if work is not None:
            threading.Event().wait(0.001)

    def run(self, until: Callable[[], bool] | None = None, *, turns: int = 4000, seconds: float = 0.25) -> None:
        for _ in range(turns):
            if self.server.finished if until is None else until():
                return
            self.turn(seconds)
        raise AssertionError(f"the run hangs in {self.server.state.phase} of round {self.server.state.round}")

    def model_bytes(self) -> bytes:
        path = self.server.result().model_path
        assert path is not None
        return path.read_bytes()


def fleet(**changes: Any) -> dict[str, Behaviour]:
    """Three devices with different samples."""
    return {
        name: replace(Behaviour(sample_count=count), **changes)
        for name, count in (("ada", 7), ("bob", 20), ("cyd", 33))
    }
