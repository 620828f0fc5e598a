"""A device without a trainer: it does what the agent does, and learns what a function of its name tells it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.protocol.blobs import BlobRef, decode_chunk
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.memory import PackingWidth
from subfleet.protocol.messages import (
    BlobMissing,
    ChunkRequest,
    Deployed,
    Evaluated,
    Message,
    Presence,
    Profile,
    Receipt,
    Refusal,
    RoundInfo,
    Scores,
    Task,
    Telemetry,
    Update,
    decode,
    encode,
)
from subfleet.protocol.readings import Reading
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.task import Deploy, Evaluate, Score
from subfleet.protocol.topics import CHUNK, Topics
from subfleet.transport.base import Connected, Delivery, Transport
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.exchange import BlobExchange, Fetched
from subfleet.transport.outbox import Outbox

SHAPE = (6,)
CLASSES = 3
PLENTY_BYTES = 10**9


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
    log_memory_bytes: Callable[[float], int] | None = None
    reading: Callable[[int], Reading] = lambda _: Reading(memory_free_bytes=PLENTY_BYTES)
    refuse: Callable[[Task], tuple[str, int | None] | None] = lambda _: None
    score: Callable[[Task], tuple[float, ...]] = lambda task: tuple(float(place) for place in range(len(task.programs)))
    change: Callable[[Mapping[str, Any], Task], dict[str, Any]] | None = None
    sample_count: int = 10
    held_out_count: int = 0
    evaluate: Callable[[Mapping[str, Any], Task], tuple[float, float]] = lambda weights, task: (0.5, 0.75)
    runtimes: tuple[str, ...] = ("onnx",)
    operators: tuple[str, ...] = ()
    packing_width: PackingWidth | None = None
    architecture: SubnetSpec | None = None
    network: str = ""
    input_shape: tuple[int, ...] = SHAPE
    scale: float = 0.1

    def memory_at(self, info: RoundInfo) -> int:
        """By the replayed log's time where there is a log, else by the round."""
        if self.log_memory_bytes is None or info.log_time_s is None:
            return self.memory_budget_bytes(info.round)
        return self.log_memory_bytes(info.log_time_s)


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

    def keep(self, message: Telemetry | Update | Refusal | Deployed | Scores | Evaluated) -> None:
        self.outbox.put(message.message_id, self.topics.up(self.client_id, message.KIND), encode(message))

    def profile(self) -> Profile:
        return Profile(
            client_id=self.client_id,
            session_id=self.session_id,
            device="fake",
            runtimes=self.behaviour.runtimes,
            sample_count=self.behaviour.sample_count,
            held_out_count=self.behaviour.held_out_count,
            class_counts=(1,) * CLASSES,
            input_shape=self.behaviour.input_shape,
            memory_total_bytes=PLENTY_BYTES,
            memory_share=1.0,
            operators=self.behaviour.operators,
            packing_width=self.behaviour.packing_width,
            architecture=self.behaviour.architecture,
            network=self.behaviour.network,
            message_id=f"profile.{self.session_id}",
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
                memory_budget_bytes=self.behaviour.memory_at(info),
                message_id=f"telemetry/{info.run_id}/{info.round}.{info.retry}/{self.client_id}",
                retry=info.retry,
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
        self.lacking = {blob.sha256 for blob in task.blobs}
        for blob in task.blobs:
            self.exchange.fetch("server", blob)

    def _work(self) -> None:
        task = self.task
        if task is None or self.lacking:
            return
        self.task = None
        self.done.add(task.task_id)
        if isinstance(task.work, Score):
            found = tuple(CandidateScore(score=score) for score in self.behaviour.score(task))
            self.keep(
                Scores(
                    task_id=task.task_id,
                    run_id=task.run_id,
                    round=task.round,
                    client_id=self.client_id,
                    scores=found,
                    seconds=0.1,
                    message_id=f"scores/{task.task_id}",
                )
            )
            return
        if isinstance(task.work, Deploy):
            self.keep(
                Deployed(
                    task_id=task.task_id,
                    run_id=task.run_id,
                    client_id=self.client_id,
                    files=tuple(f"model.{program.target}" for program in task.programs),
                )
            )
            return
        if isinstance(task.work, Evaluate):
            self.keep(self.found_for(task))
            return
        self.keep(self.update_for(task, self.store.add(encode_arrays(self._learned(task)))))

    def found_for(self, task: Task) -> Evaluated:
        loss, accuracy = self.behaviour.evaluate(decode_arrays(self.store.path(task.weights[0]).read_bytes()), task)
        return Evaluated(
            task_id=task.task_id,
            run_id=task.run_id,
            round=task.round,
            client_id=self.client_id,
            loss=loss,
            accuracy=accuracy,
            sample_count=self.behaviour.held_out_count,
            label_count=self.behaviour.held_out_count,
            measured_peak_bytes=10,
            seconds=0.1,
            message_id=f"evaluated.{task.task_id}",
        )

    def _learned(self, task: Task) -> dict[str, Any]:
        weights = decode_arrays(self.store.path(task.weights[0]).read_bytes())
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
