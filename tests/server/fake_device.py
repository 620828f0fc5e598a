"""Devices for tests of the server: real agent sessions with a meter, worker and link that follow a `Behaviour`."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from subfleet.agent.outcomes import EvaluationEnded, ScoringEnded, WorkFailed
from subfleet.agent.states import AgentSettings
from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.device.meters import Direction
from subfleet.edge_client import session
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.task_work import Outcome, TrainingOutput, locate_output
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import TrainResult
from subfleet.protocol.memory_plan import PackingWidth
from subfleet.protocol.messages import Ack, Message, Profile, RoundInfo, Telemetry, decode, encode
from subfleet.protocol.readings import Reading
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, Train
from subfleet.protocol.topics import CHUNK, Topics
from subfleet.transport.base import Delivery, Event, Transport, Will

SHAPE = (6,)
CLASSES = 3
PLENTY_BYTES = 10**9


def small_change(weights: Mapping[str, Any], client_id: str, round_number: int, scale: float) -> dict[str, Any]:
    """Return what a fake device learns: a function of its weights, its name and the round alone."""
    digest = hashlib.sha256(f"{client_id}/{round_number}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return {
        name: (scale * (generator.random(array.shape) - 0.5) - 0.1 * scale * array).astype(np.float32)
        for name, array in sorted(weights.items())
    }


@dataclass(kw_only=True)
class Behaviour:
    """How a device answers. `says` may alter or drop its messages, which no real agent does."""

    memory_budget_bytes: Callable[[int], int] = lambda _: PLENTY_BYTES
    log_memory_bytes: Callable[[float], int] | None = None
    reading: Callable[[int], Reading] = lambda _: Reading()
    refuse: Callable[[Task], tuple[str, int | None] | None] = lambda _: None
    score: Callable[[Task], tuple[float, ...]] = lambda task: tuple(float(index) for index in range(len(task.programs)))
    change: Callable[[Mapping[str, Any], Task], dict[str, Any]] | None = None
    says: Callable[[Message], Message | None] = lambda message: message
    device: str = "fake"
    sample_count: int = 10
    held_out_count: int = 0
    evaluate: Callable[[Mapping[str, Any], Task], tuple[float, float]] = lambda weights, task: (0.5, 0.75)
    runtimes: tuple[str, ...] = ("onnx",)
    operators: tuple[str, ...] = ()
    packing_width: PackingWidth | None = None
    architecture: Architecture | None = None
    network: str = ""
    input_shape: tuple[int, ...] = SHAPE
    scale: float = 0.1

    def memory_at(self, info: RoundInfo) -> int:
        """Return the memory by the time of the replayed log, or by the round where there is no log."""
        if self.log_memory_bytes is None or info.log_time_s is None:
            return self.memory_budget_bytes(info.round)
        return self.log_memory_bytes(info.log_time_s)


class Device:
    """A client with its real session, and the messages that it received.

    `start` numbers the starts of its process: a later start continues from the files in its folder.
    """

    def __init__(
        self,
        client_id: str,
        transport: Transport,
        folder: Path,
        clock: Callable[[], float],
        behaviour: Behaviour,
        *,
        start: int = 1,
    ) -> None:
        self.client_id = client_id
        self.session_id = f"{client_id}-{start}"
        self.behaviour = behaviour
        self.transport = transport
        self.rounds: list[RoundInfo] = []
        self.tasks: list[Task] = []
        self.acks: dict[str, Ack] = {}
        store = AgentStore(folder / client_id)
        store.work_folder.mkdir(exist_ok=True)
        self._session = session.EdgeSession(
            AgentSettings(profile=self.profile()),
            _Link(self),
            Topics("main"),
            session.Device(store=store, worker=_Worker(self, store), meter=_Meter(self)),
            clock=clock,
        )

    def open(self) -> None:
        self._session.open()

    def step(self) -> None:
        self._session.turn(0.0)

    def send(self, message: Message, *, retain: bool = False) -> None:
        """Send a message that no agent would send."""
        topic = Topics("main").uplink(self.client_id, message.KIND)
        self.transport.publish(topic, encode(message), retain=retain)

    def receive(self, message: Message) -> None:
        if isinstance(message, RoundInfo):
            self.rounds.append(message)
        elif isinstance(message, Task) and message.task_id not in {task.task_id for task in self.tasks}:
            self.tasks.append(message)
        elif isinstance(message, Ack):
            self.acks[message.of] = message

    def profile(self) -> Profile:
        return Profile(
            client_id=self.client_id,
            session_id=self.session_id,
            device=self.behaviour.device,
            runtimes=self.behaviour.runtimes,
            sample_count=self.behaviour.sample_count,
            held_out_count=self.behaviour.held_out_count,
            class_counts=(1,) * CLASSES,
            input_shape=self.behaviour.input_shape,
            memory_total_bytes=PLENTY_BYTES,
            memory_fraction=1.0,
            operators=self.behaviour.operators,
            packing_width=self.behaviour.packing_width,
            architecture=self.behaviour.architecture,
            network=self.behaviour.network,
            message_id=f"profile.{self.session_id}",
        )


class _Link:
    """The device's transport; it records the messages that arrive."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        self._device.transport.open(subscriptions, will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if not topic.endswith(f"/{CHUNK}"):
            message = decode(payload)
            if isinstance(message, Telemetry):  # free space on the disk of this machine must not matter to a test
                message = replace(message, disk_budget_bytes=None)
            altered = self._device.behaviour.says(message)
            if altered is None:
                return
            payload = encode(altered)
        self._device.transport.publish(topic, payload, retain=retain)

    def poll(self, timeout_s: float) -> Event | None:
        event = self._device.transport.poll(timeout_s)
        if isinstance(event, Delivery) and event.payload and not event.topic.endswith(f"/{CHUNK}"):
            self._device.receive(decode(event.payload))
        return event

    def close(self) -> None:
        self._device.transport.close()


class _Meter:
    """Reads what the behaviour gives for the round announced last."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def read(self, log_time_s: float | None) -> tuple[float | None, Reading]:
        behaviour, rounds = self._device.behaviour, self._device.rounds
        if not rounds:
            return log_time_s, Reading()
        reading = behaviour.reading(rounds[-1].round)
        return log_time_s, replace(reading, memory_free_bytes=behaviour.memory_at(rounds[-1]))

    def low(self, quantile: float) -> Reading | None:
        return None

    def note_transfer(self, direction: Direction, size_bytes: int, now_s: float) -> None:
        pass


class _Worker:
    """Completes a task as soon as it is started."""

    def __init__(self, device: Device, store: AgentStore) -> None:
        self._device = device
        self._store = store
        self._outcome: Outcome | None = None

    def start(self, task: Task, memory_limit_bytes: int, data_bytes: int = 0) -> None:
        refusal = self._device.behaviour.refuse(task)
        if refusal is None:
            self._outcome = self._perform(task)
            return
        reason: Any = refusal[0]
        self._outcome = WorkFailed(task_id=task.task_id, reason=reason, detail="as told", available_bytes=refusal[1])

    def stop(self) -> None:
        pass

    def join(self, timeout_s: float) -> None:
        pass

    def outcome(self) -> Outcome | None:
        outcome, self._outcome = self._outcome, None
        return outcome

    def _perform(self, task: Task) -> Outcome:
        behaviour = self._device.behaviour
        match task.work:
            case Score():
                scores = tuple(CandidateScore(score=score) for score in behaviour.score(task))
                return ScoringEnded(task_id=task.task_id, scores=scores)
            case Evaluate():
                weights = decode_arrays(self._store.blobs.path(task.weights[0]).read_bytes())
                loss, accuracy = behaviour.evaluate(weights, task)
                return EvaluationEnded(
                    task_id=task.task_id,
                    result=EvaluationResult(
                        loss=loss,
                        accuracy=accuracy,
                        sample_count=behaviour.held_out_count,
                        label_count=behaviour.held_out_count,
                        measured_peak_bytes=10,
                    ),
                )
            case Train() | Calibrate():
                path = locate_output(self._store.work_folder, task.task_id)
                path.write_bytes(encode_arrays(self._learn(task, self._store.blobs.path(task.weights[0]))))
                result = TrainResult(
                    sample_count=behaviour.sample_count,
                    step_count=1,
                    loss=1.0,
                    accuracy=0.5,
                    measured_peak_bytes=900,
                    train_seconds=0.1,
                )
                return TrainingOutput(task_id=task.task_id, result=result, output_path=path)
            case Deploy():
                raise AssertionError("no worker places models")

    def _learn(self, task: Task, weights_path: Path) -> dict[str, Any]:
        behaviour, weights = self._device.behaviour, decode_arrays(weights_path.read_bytes())
        if behaviour.change is not None:
            return behaviour.change(weights, task)
        return small_change(weights, task.client_id, task.round, behaviour.scale)
