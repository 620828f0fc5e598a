"""The benchmark of lying clients: its verdict, and the messages of these clients."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Message, Presence, Profile, Refusal, Task, Telemetry, Update, decode, encode
from subfleet.protocol.readings import Reading
from subfleet.protocol.topics import Topics
from subfleet.transport.base import Delivery, Event, Will

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOPICS = Topics()


@pytest.fixture(autouse=True)
def _make_benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def _import(module: str, name: str) -> Any:
    """Import from the benchmark, which is a folder of scripts and not installed."""
    return getattr(importlib.import_module(f"liar_benchmark.{module}"), name)


class RecordingTransport:
    """A transport that records messages, and delivers given events."""

    def __init__(self, *events: Event) -> None:
        self.sent: list[Message] = []
        self._events = list(events)

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None: ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        address = TOPICS.parse(topic)
        assert (address.direction, address.client_id) == ("up", "eve")
        self.sent.append(decode(payload, expected=address.kind))

    def poll(self, timeout_s: float) -> Event | None:
        return self._events.pop(0) if self._events else None

    def close(self) -> None: ...


PROFILE = Profile(
    client_id="eve",
    session_id="eve-1",
    device="virtual",
    runtimes=("torch",),
    sample_count=50,
    class_counts=(20, 30),
    input_shape=(1, 8, 8),
    memory_total_bytes=10**9,
    memory_fraction=0.5,
)
TELEMETRY = Telemetry(
    client_id="eve",
    session_id="eve-1",
    run_id="run",
    round=1,
    log_time_s=0.0,
    reading=Reading(memory_free_bytes=10**8, downlink_bps=1e6, uplink_bps=1e6),
    memory_budget_bytes=10**8,
)
UPDATE = Update(
    task_id="task",
    run_id="run",
    round=1,
    client_id="eve",
    blob=BlobRef(sha256="0" * 64, size_bytes=1),
    sample_count=50,
    step_count=7,
    loss=0.5,
    accuracy=0.9,
    measured_peak_bytes=1,
    train_seconds=1.0,
    seconds=1.0,
    square_loss=0.3,
)


def _rewrite(kind: str, *messages: Message) -> list[Message]:
    create_link = _import("lying", "create_link_wrapper")
    recording = RecordingTransport()
    link = create_link(kind, TOPICS)(recording)
    for message in messages:
        link.publish(TOPICS.uplink("eve", message.KIND), encode(message))
    return recording.sent


def test_a_claimer_claims_the_largest_values() -> None:
    profile, telemetry, update = _rewrite("claimer", PROFILE, TELEMETRY, UPDATE)

    assert isinstance(profile, Profile)
    assert (profile.sample_count, profile.class_counts, profile.macs_per_s) == (2**40, (2**40, 2**40), 1e300)
    assert isinstance(telemetry, Telemetry)
    assert telemetry.memory_budget_bytes == 2**62
    assert isinstance(update, Update)
    assert (update.sample_count, update.loss, update.square_loss) == (2**40, 1e30, 1e30)


def test_a_silent_liar_reports_and_receives_no_task() -> None:
    create_link = _import("lying", "create_link_wrapper")
    task = Delivery(topic=TOPICS.downlink("eve", Task.KIND), payload=b"any")
    other = Delivery(topic=TOPICS.downlink("eve", "ack"), payload=b"any")
    link = create_link("silent", TOPICS)(RecordingTransport(task, other))

    assert link.poll(0.0) == other
    assert _rewrite("silent", PROFILE, TELEMETRY) == [PROFILE, TELEMETRY]


def test_a_churner_refuses_then_sends_and_changes_its_session_at_each_heartbeat() -> None:
    beat = Presence(client_id="eve", session_id="eve-1", online=True)
    messages = _rewrite("churner", PROFILE, TELEMETRY, UPDATE, beat, beat)

    kinds = [message.KIND for message in messages]
    assert kinds == [
        "profile",
        "telemetry",
        "refusal",
        "presence",
        "profile",
        "update",
        "update",
        "presence",
        "profile",
        "update",
    ]
    sessions = [message.session_id for message in messages if isinstance(message, Presence | Profile)]
    assert sessions == ["eve-again-0", *["eve-again-1"] * 2, *["eve-again-2"] * 2]
    telemetry, refusal = messages[1:3]
    assert isinstance(telemetry, Telemetry)
    assert telemetry.memory_budget_bytes == 1
    assert isinstance(refusal, Refusal)
    assert refusal.task_id == UPDATE.task_id
    updates = [message for message in messages if isinstance(message, Update)]
    assert updates[0] == UPDATE
    assert len({message.message_id for message in updates}) == 3, "it repeats itself under other ids"


def test_a_garbler_multiplies_its_changes_by_minus_30_then_sends_nan_and_tiny_numbers(tmp_path: Path) -> None:
    garbling_trainer = _import("lying", "GarblingTrainer")
    learned = np.array([1.0, -2.0], np.float32)
    job = SimpleNamespace(output_path=tmp_path / "change")

    def train(job: Any, stopped: Any) -> str:
        job.output_path.write_bytes(encode_arrays({"w": learned}))
        return "told"

    garbling = garbling_trainer(SimpleNamespace(train=train, target="torch"))
    changes = list(_train_repeatedly(garbling, job, 4))

    assert garbling.target == "torch"
    assert [array.tolist() for array in changes[:2]] == [[-30.0, 60.0]] * 2
    assert np.isnan(changes[2]).all()
    assert (changes[3] > 0).all()
    assert (changes[3] < np.finfo(np.float32).tiny).all()


def _train_repeatedly(garbling: Any, job: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        assert garbling.train(job, lambda: False) == "told"
        yield np.asarray(decode_arrays(job.output_path.read_bytes())["w"])


def _build_row(without: Sequence[float], beside: Sequence[float], **changes: Any) -> Any:
    game_result = _import("games", "GameResult")
    build_row = _import("tables", "build_row")
    first, second = (
        [game_result(accuracy=accuracy, rounds=18, planned_rounds=18) for accuracy in accuracies]
        for accuracies in (without, beside)
    )
    return build_row("fedavg", first, [replace(result, **changes) for result in second])


@pytest.mark.parametrize(
    ("row", "problems"),
    [
        ({"without": (0.8, 0.82), "beside": (0.79, 0.80)}, ()),
        ({"without": (0.8, 0.8), "beside": (0.9, 0.9)}, ()),
        (
            {"without": (0.8, 0.82), "beside": (0.74, 0.82)},
            ("fedavg: honest members lost 3.0 points, but may lose 2 at most",),
        ),
        ({"without": (0.8,), "beside": (0.8,), "rounds": 17}, ("fedavg: not all rounds closed",)),
        ({"without": (0.8,), "beside": (0.8,), "rounds": 0, "failure": "why"}, ("fedavg: a run did not end: why",)),
    ],
    ids=["within two points", "gained", "lost", "a round short", "did not end"],
)
def test_the_verdict(row: Any, problems: tuple[str, ...]) -> None:
    find_problems = _import("tables", "find_problems")
    assert tuple(find_problems([_build_row(**row)])) == problems


def test_the_table_ends_with_the_worst_and_the_median() -> None:
    build_table = _import("tables", "build_table")
    rows = [
        replace(_build_row((0.8,), (0.8 + difference,)), method=name)
        for name, difference in (("a", 0.01), ("b", -0.05), ("c", 0.0))
    ]

    assert build_table(rows)[-1] == "Worst: b, -5.0 points; median of all +0.0 points."


def test_removed_guards_limit_no_claims() -> None:
    create_run = _import("games", "create_run")
    remove_guards = _import("games", "remove_guards")
    run = remove_guards(create_run("oort", 1, 18))
    assert (run.max_client_fraction, run.outliers.outliers, run.outliers.loss_factor) == (1.0, "off", 0)
    assert getattr(run.method, "most_often", None) == 0.0
    assert getattr(remove_guards(create_run("fedtrans", 1, 18)).method, "averaged", None) == "all"
