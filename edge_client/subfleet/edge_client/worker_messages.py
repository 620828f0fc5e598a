"""The messages between an agent and its worker process: lines of JSON, validated on reading."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from subfleet.agent.outcomes import EvaluationEnded, ScoringEnded, WorkFailed
from subfleet.edge_client.task_work import Outcome, TrainingOutput, locate_output
from subfleet.protocol.errors import (
    BrokenError,
    ConfigError,
    DataError,
    FileError,
    ProtocolError,
    SubfleetError,
    TrainingError,
)
from subfleet.protocol.jobs import DataSummary, TrainResult
from subfleet.protocol.schema import from_plain, parse_json, to_plain
from subfleet.protocol.task import Task

MAX_LINE_BYTES = 16 * 2**20
MOST_CHARACTERS = 4096
"""The longest text of a report; longer ones are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The means to do tasks, as the agent sends them to the worker process.

    Attributes:
        runtimes: names of trainers; the first working one is used.
        provider: the runtime's provider.
        data: the data of `--data`.
        held_out: held-out data as `--held-out` names them; None without any.
        threads: number of threads of the runtime.
        blobs: the folder of programs and weights.
        work_folder: the folder for outputs.
        log_level: the least level of shown logs.
        binds_memory: whether the system ends or refuses what exceeds a task's memory, so that a device is emulated
            that has no more; else the system's limit is far above, as a guard against single steps.
        groups: control groups that were made for this process; empty limits it by its own limit of data.
    """

    runtimes: tuple[str, ...]
    provider: str
    data: str
    held_out: str | None
    threads: int
    blobs: Path
    work_folder: Path
    log_level: int
    binds_memory: bool = False
    groups: tuple[Path, ...] = ()

    def line(self) -> bytes:
        """Encode the first line that the process reads. Paths may contain any bytes, so it is no validated message."""
        plain = asdict(self) | {"blobs": str(self.blobs), "work_folder": str(self.work_folder)}
        plain["groups"] = [str(folder) for folder in self.groups]
        return json.dumps(plain).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> "Workplace":
        """Decode what `line` wrote."""
        plain = json.loads(line)
        folders = {name: Path(plain[name]) for name in ("blobs", "work_folder")}
        groups = tuple(Path(folder) for folder in plain["groups"])
        return cls(**{**plain, **folders, "runtimes": tuple(plain["runtimes"]), "groups": groups})


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A task to do; see `TaskWorker.start` for the limits."""

    task: Task
    memory_limit_bytes: int
    data_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Stop the task at its next step."""

    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The worker process is ready.

    Attributes:
        target: the target of its programs.
        data: summary of the training data.
        held_out: summary of the held-out data; None if there are none.
    """

    target: str
    data: DataSummary
    held_out: DataSummary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The worker process cannot do any task, and ends with an exit code and a message."""

    code: int
    text: str

    def error(self) -> SubfleetError:
        """Make the error to raise."""
        return _ERRORS.get(self.code, SubfleetError)(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """The outcome of a task, and the memory that is kept for the next one."""

    outcome: Outcome
    held_bytes: int


Report = Opened | StartFailed | TaskEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputReport:
    """`TrainingOutput` without its path, which is derived from the task's id."""

    task_id: str
    result: TrainResult


_ERRORS: Mapping[int, type[SubfleetError]] = MappingProxyType(
    {kind.exit_code: kind for kind in (BrokenError, ConfigError, DataError, FileError, ProtocolError, TrainingError)}
)
_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (Order, Stop, Opened, StartFailed, _OutputReport, ScoringEnded, EvaluationEnded, WorkFailed)
    }
)
_HELD = "held_bytes"


def encode_line(message: Order | Stop | Report) -> bytes:
    """Encode a message as a line."""
    held: dict[str, int] = {}
    inner: Any = message
    if isinstance(message, TaskEnded):
        held, inner = {_HELD: message.held_bytes}, message.outcome
    if isinstance(inner, TrainingOutput):
        inner = _OutputReport(task_id=inner.task_id, result=inner.result)
    plain = {type(inner).__name__: _make_sendable(to_plain(inner)), **held}
    return json.dumps(plain).encode() + b"\n"


def decode_order(line: bytes) -> Order | Stop:
    """Decode an order of an agent.

    Raises:
        ProtocolError: it is not such a message.
    """
    message, _ = _read(line)
    if isinstance(message, Order | Stop):
        return message
    raise ProtocolError(f"an agent sent {type(message).__name__}, but must send an order")


def decode_report(line: bytes, work_folder: Path) -> Report:
    """Decode a report of a worker process.

    Raises:
        ProtocolError: it is not such a message.
    """
    message, held_bytes = _read(line)
    if isinstance(message, Opened | StartFailed):
        return message
    if isinstance(message, _OutputReport):
        path = locate_output(work_folder, message.task_id)
        message = TrainingOutput(task_id=message.task_id, result=message.result, output_path=path)
    if isinstance(message, TrainingOutput | ScoringEnded | EvaluationEnded | WorkFailed):
        return TaskEnded(outcome=message, held_bytes=held_bytes)
    raise ProtocolError(f"a worker process sent {type(message).__name__}, but must send a report")


def _read(line: bytes) -> tuple[Any, int]:
    plain = parse_json(line, max_bytes=MAX_LINE_BYTES)
    if not isinstance(plain, dict):
        raise ProtocolError(f"a line is {type(plain).__name__}, but must be an object")
    held_bytes = from_plain(int, plain.pop(_HELD, 0), _HELD)
    if len(plain) != 1 or (name := next(iter(plain))) not in _KINDS:
        raise ProtocolError(f"a line has the keys {sorted(plain)!r:.80}, but must have one of {sorted(_KINDS)}")
    return from_plain(_KINDS[name], plain[name]), max(held_bytes, 0)


def _make_sendable(plain: Any) -> Any:
    """Replace characters that JSON cannot carry: file names and error texts may contain anything."""
    if isinstance(plain, str):
        return plain.encode("utf-8", "replace").decode().replace("\0", "?")[:MOST_CHARACTERS]
    if isinstance(plain, list):
        return [_make_sendable(item) for item in plain]
    if isinstance(plain, dict):
        return {key: _make_sendable(item) for key, item in plain.items()}
    return plain
