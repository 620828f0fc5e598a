"""The messages: frozen, validated, JSON on the wire, each with an id and safe to receive twice.

All metadata is in the payload, so MQTT 3.1.1 and 5 carry messages alike. Long messages are compressed. `decode` raises
only `ProtocolError`, for any bytes.
"""

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args

from subfleet.protocol.answers import Answer, Deployed, Evaluated, Refusal, Scores, Update
from subfleet.protocol.blobs import BlobRef, ByteRange
from subfleet.protocol.bounds import Length, Range, checked
from subfleet.protocol.class_names import ClassNames
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.identifiers import ClientId, Printable, Shown, check_client_id, make_message_id
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.limits import (
    MAX_SAMPLES,
    NAMES,
    SHOWN_NAMES,
    Amount,
    Count,
    MessageId,
    Positive,
    PositiveAmount,
    PositiveFraction,
    RunId,
    Samples,
    Seconds,
    SessionId,
    Shape,
    Shapes,
)
from subfleet.protocol.memory_plan import PackingWidth
from subfleet.protocol.readings import LogLow, Reading
from subfleet.protocol.reasons import ArchitectureProblem, RefusalReason
from subfleet.protocol.schema import ADDED_LATER, canonical_json, from_plain, parse_json, to_plain
from subfleet.protocol.submodel import MAX_ARCHITECTURE_BYTES, Architecture
from subfleet.protocol.task import Task
from subfleet.protocol.text import check_texts, may_have_control_characters

__all__ = [
    "MAX_SAMPLES",
    "MESSAGES",
    "SCHEMA_VERSION",
    "Ack",
    "ArchitectureProblem",
    "BlobMissing",
    "ChunkRequest",
    "Claim",
    "Deployed",
    "Evaluated",
    "Message",
    "Presence",
    "Profile",
    "Refusal",
    "RefusalReason",
    "RoundInfo",
    "Scores",
    "Task",
    "Telemetry",
    "Update",
    "check_client_id",
    "decode",
    "encode",
    "make_message_id",
    "text_bytes",
]

SCHEMA_VERSION = 3
MAX_CONTROL_BYTES = 256 * 1024
"""Size of a message as JSON."""
_PLAIN_BYTES = 4 * 1024
"""Longer messages are gzipped: a task with the channels of a large network must fit a broker's limit of 64 KiB."""
_GZIP, _GZIP_WINDOW = b"\x1f\x8b", 31
"""First bytes of a compressed payload, and zlib's number for the gzip format."""
MAX_SAMPLE_BYTES = 2**32
MAX_ROUNDS = 2**31

RoundCount = Annotated[int, Range(least=0, below=MAX_ROUNDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Presence:
    """A device is online (retained), or offline (its will). Heartbeats renew a lease; the will is only a hint.

    The server ignores retained ones; they are for people who inspect the broker.

    Attributes:
        session_id: changes whenever the agent starts.
        reason: why the device leaves, in its goodbye; empty while it is online, and in a will.
    """

    KIND: ClassVar[str] = "presence"
    client_id: ClientId
    session_id: SessionId
    online: bool
    message_id: MessageId = field(default_factory=make_message_id)
    reason: Annotated[str, Length(most=128)] = field(default="", metadata=ADDED_LATER)


def _check_network(network: str, architecture: Architecture | None) -> Iterator[str]:
    if network and architecture is not None:
        yield "a profile declares both an architecture and a network of its own, but must declare only one"


def _check_architecture(architecture: Architecture | None) -> Iterator[str]:
    architecture_bytes = 0 if architecture is None else len(canonical_json(architecture))
    if architecture_bytes > MAX_ARCHITECTURE_BYTES:
        yield f"architecture has {architecture_bytes} bytes, but must have at most {MAX_ARCHITECTURE_BYTES}"
    if architecture is not None and not architecture.name.isprintable():
        yield f"architecture.name is {architecture.name!r:.80}, but must be made of printable characters"


def _check_class_names(class_counts: tuple[int, ...], class_names: tuple[str, ...]) -> Iterator[str]:
    if class_names and len(class_names) != len(class_counts):
        yield f"there are {len(class_names)} class names for {len(class_counts)} class counts"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_network, _check_architecture, _check_class_names)
class Profile:
    """The properties of a device (retained): they change only when the agent restarts.

    Attributes:
        device: name of its device profile, such as "raspberry_pi_4".
        runtimes: program targets that it can run, the preferred one first.
        sample_count: number of training samples.
        class_counts: samples of each class; empty if labels are numbers.
        input_shape: shape of one sample.
        memory_total_bytes: total memory of the device.
        memory_fraction: fraction of free memory for training, above 0, at most 1.
        max_training_bytes: memory limit for training, 1 or more; None means no limit.
        software: versions by name.
        operators: operators that its runtime has; empty if unknown, so that every program is tried.
        macs_per_s: training speed in multiply-accumulates per second, above 0; None if unknown.
        architecture: the submodel that it wants to train, for methods with declared architectures. An ack answers it.
            None declares nothing, and no ack is sent.
        network: instead of an architecture, a network of its own, as a JSON object with the keys of a run's `[model]`.
            An ack answers it; empty declares nothing.
        class_names: names of the counted classes, by which the device maps its data to the run's classes; empty if its
            data number classes as the run does.
        other_input_shapes: other shapes that it can read a sample in, such as gray and coloured pictures.
        packing_width: number of outputs that its matrix kernels compute at once; None means the usual number.
        held_out_count: number of held-out samples, which are only evaluated on; 0 if there are none.
        inputs: statistics of all values of its samples; None if not reported.
        training_watts: power that training takes beyond that of an idle device, above 0; None if unknown.
        sizes_differ: its pictures have several sizes, and `input_shape` is the most frequent one.
    """

    KIND: ClassVar[str] = "profile"
    client_id: ClientId
    session_id: SessionId
    device: Annotated[str, Length(most=128), Printable]
    runtimes: Annotated[tuple[str, ...], Length(least=1, most=16), SHOWN_NAMES]
    sample_count: Samples
    class_counts: Annotated[tuple[Count, ...], Length(most=65_536)]
    input_shape: Shape
    memory_total_bytes: int
    memory_fraction: PositiveFraction
    software: Annotated[dict[str, str], Length(most=64), NAMES] = field(default_factory=dict)
    message_id: MessageId = field(default_factory=make_message_id)
    operators: Annotated[tuple[str, ...], Length(most=1024), SHOWN_NAMES] = field(default=(), metadata=ADDED_LATER)
    macs_per_s: PositiveAmount | None = field(default=None, metadata=ADDED_LATER)
    architecture: Architecture | None = field(default=None, metadata=ADDED_LATER)
    max_training_bytes: Positive | None = field(default=None, metadata=ADDED_LATER)
    class_names: ClassNames = field(default=(), metadata=ADDED_LATER)
    other_input_shapes: Shapes = field(default=(), metadata=ADDED_LATER)
    packing_width: PackingWidth | None = field(default=None, metadata=ADDED_LATER)
    held_out_count: Annotated[int, Range(least=0, most=MAX_SAMPLES)] = field(default=0, metadata=ADDED_LATER)
    network: Annotated[str, Length(most=4096), Printable] = field(default="", metadata=ADDED_LATER)
    inputs: InputStatistics | None = field(default=None, metadata=ADDED_LATER)
    sizes_differ: bool = field(default=False, metadata=ADDED_LATER)
    training_watts: PositiveAmount | None = field(default=None, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Telemetry:
    """The current resources of a device. One is due for every round, as the answer to its announcement.

    Attributes:
        run_id: the run that it answers; None outside rounds.
        round: the round that it answers; None outside rounds.
        log_time_s: the position in the replayed log; None for a live reading.
        reading: the measured or replayed resources.
        memory_budget_bytes: memory for training: the device's fraction of free memory, up to its limit, and less after
            training killed its process.
        attempt: of the announcement that it answers.
        log_low: resources that its log exceeds except for the announced fraction of time; None if not reported.
        disk_budget_bytes: disk space for a task, as `subfleet.protocol.disk` counts it; None if unknown.
    """

    KIND: ClassVar[str] = "telemetry"
    client_id: ClientId
    session_id: SessionId
    run_id: RunId | None
    round: int | None
    log_time_s: float | None
    reading: Reading
    memory_budget_bytes: Count
    message_id: MessageId = field(default_factory=make_message_id)
    attempt: int = field(default=0, metadata=ADDED_LATER)
    log_low: LogLow | None = field(default=None, metadata=ADDED_LATER)
    disk_budget_bytes: Count | None = field(default=None, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class RoundInfo:
    """The state of the run (retained, to everyone; in asynchronous rounds to one device, too, to ask it for telemetry).

    Attributes:
        phase: "measure" requests telemetry; in "train" tasks are out; "finished" ends the run.
        log_time_s: the position at which replayed logs are read in this round; None for a live run.
        deadline_s: seconds after which the phase closes without the missing devices.
        attempt: number of earlier attempts of the round, which aggregated nothing.
        log_quantile: devices that replay a log report the resources that it exceeds except for this fraction of its
            time; None requests nothing.
        sample_bytes: memory of a sample after the run's transform; 0 if the transform does not change it.
        asynchronous: tasks of earlier rounds go on, and "measure" is sent to one device alone.
    """

    KIND: ClassVar[str] = "round"
    run_id: Annotated[RunId, Shown]
    round: RoundCount
    round_count: RoundCount
    phase: Literal["measure", "train", "finished"]
    log_time_s: float | None
    deadline_s: Seconds
    message_id: Annotated[str, Length(most=256), Shown] = field(default_factory=make_message_id)
    attempt: RoundCount = field(default=0, metadata=ADDED_LATER)
    log_quantile: Annotated[float, Range(least=0, below=1)] | None = field(default=None, metadata=ADDED_LATER)
    sample_bytes: Annotated[int, Range(least=0, most=MAX_SAMPLE_BYTES)] = field(default=0, metadata=ADDED_LATER)
    asynchronous: bool = field(default=False, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Ack:
    """Ends an exchange: only now may the sender forget the message `of`.

    Attributes:
        status: "accepted" (and stored), "duplicate" (was accepted before) or "refused" (do not send it again).
        reason: why the message is refused; for accepted telemetry, why the device gets no task in that round.
        problem: why a profile's declared architecture is refused; else None.
    """

    KIND: ClassVar[str] = "ack"
    of: Annotated[str, Length(most=512)]
    status: Literal["accepted", "duplicate", "refused"]
    reason: str = ""
    message_id: Annotated[str, Length(most=640)] = field(default_factory=make_message_id)
    problem: ArchitectureProblem | None = field(default=None, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ChunkRequest:
    """Requests ranges of a blob, of which at most a window is outstanding."""

    KIND: ClassVar[str] = "request"
    blob: BlobRef
    ranges: Annotated[tuple[ByteRange, ...], Length(least=1, most=64)]
    message_id: str = field(default_factory=make_message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobMissing:
    """Answers a request for a blob that this side does not have."""

    KIND: ClassVar[str] = "missing"
    sha256: str
    message_id: str = field(default_factory=make_message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Claim:
    """Claims the lock of a fleet's server or of a device's id (retained, on the lock's topic).

    Attributes:
        session_id: identifies this start of the process.
        holder: the run that is served, or the device's id.
        since_s: Unix time at which the session began, in seconds; the earlier of two sessions stays.
    """

    KIND: ClassVar[str] = "claim"
    session_id: str
    holder: ClientId
    since_s: Amount
    message_id: str = field(default_factory=make_message_id)


Message = Presence | Profile | Telemetry | RoundInfo | Task | Answer | Ack | ChunkRequest | BlobMissing | Claim

MESSAGES: Mapping[str, type[Message]] = MappingProxyType({kind.KIND: kind for kind in get_args(Message)})


def encode(message: Message) -> bytes:
    """Encode a message as canonical JSON with its kind and schema version; a long one is compressed."""
    plain: dict[str, Any] = to_plain(message)
    text = canonical_json({"schema": SCHEMA_VERSION, "kind": message.KIND, **plain})
    return text if len(text) <= _PLAIN_BYTES else gzip.compress(text, mtime=0)


def decode(payload: bytes | memoryview, *, expected: str | None = None) -> Message:
    """Decode a message. Terminal control characters become spaces in texts for people, and are refused in names.

    Args:
        payload: the received bytes.
        expected: the kind that belongs to the topic; other kinds are refused.

    Raises:
        ProtocolError: the payload is not a valid message of that kind.
    """
    text = _inflate(payload)
    plain = parse_json(text, max_bytes=MAX_CONTROL_BYTES)
    if not isinstance(plain, dict):
        raise ProtocolError("a control message must be a JSON object")
    schema, kind = plain.pop("schema", None), plain.pop("kind", None)
    if schema != SCHEMA_VERSION:
        raise ProtocolError(f"schema version is {schema!r:.80}, but must be {SCHEMA_VERSION}; update the older side")
    if not isinstance(kind, str) or kind not in MESSAGES or (expected is not None and kind != expected):
        raise ProtocolError(f"message kind is {kind!r:.80}, but must be {expected or sorted(MESSAGES)}")
    return from_plain(MESSAGES[kind], _clean_texts(kind, plain) if may_have_control_characters(text) else plain)


def _clean_texts(kind: str, plain: dict[str, Any]) -> Any:
    """Remove terminal control characters, as both sides log each other's texts."""
    try:
        return check_texts(plain, kind)
    except RecursionError as error:
        raise ProtocolError("a control message is nested too deeply") from error


def text_bytes(payload: bytes | memoryview) -> int:
    """Compute the length of a message as JSON, capped at the limit; gzip has it in its last bytes."""
    if bytes(payload[: len(_GZIP)]) != _GZIP:
        return len(payload)
    return min(max(len(payload), int.from_bytes(payload[-4:], "little")), MAX_CONTROL_BYTES)


def _inflate(payload: bytes | memoryview) -> bytes | memoryview:
    if bytes(payload[: len(_GZIP)]) != _GZIP:
        return payload
    inflating = zlib.decompressobj(_GZIP_WINDOW)
    try:
        text = inflating.decompress(payload, MAX_CONTROL_BYTES + 1)
    except zlib.error as error:
        raise ProtocolError(f"a compressed message is damaged ({error})") from error
    if len(text) <= MAX_CONTROL_BYTES and (not inflating.eof or inflating.unused_data):
        raise ProtocolError("a compressed message is cut off, or has bytes after its end")
    return text
