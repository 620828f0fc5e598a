"""The messages: frozen, validated, JSON on the wire, each with an id and safe to receive twice.

All metadata is in the payload, so that MQTT 3.1.1 and 5 carry them alike. Long ones are compressed. `decode` raises
`ProtocolError` and nothing else, whatever the bytes.
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
from subfleet.protocol.text import check_texts, may_act

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
"""Of a message as JSON."""
_PLAIN_BYTES = 4 * 1024
"""Longer ones are gzipped: a task that lists the channels of a large network has to pass brokers that take 64 KiB."""
_GZIP, _GZIP_WINDOW = b"\x1f\x8b", 31
"""How such a payload begins, where JSON begins with a brace; and what zlib calls the format, whose CRC finds damage."""
MAX_SAMPLE_BYTES = 2**32
MAX_ROUNDS = 2**31

RoundCount = Annotated[int, Range(least=0, below=MAX_ROUNDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Presence:
    """A device is online (retained), or offline (its will). A lease renewed by heartbeats; the will is only a hint.

    The server uses only those that arrive while it listens; retained ones are for people who inspect the broker.
    `session_id` changes whenever the agent starts anew. `reason` stands in a goodbye, and says why the device goes; it
    is empty while it is there, and in a will, which the broker publishes in place of a device whose connection broke.
    """

    KIND: ClassVar[str] = "presence"
    client_id: ClientId
    session_id: SessionId
    online: bool
    message_id: MessageId = field(default_factory=make_message_id)
    reason: Annotated[str, Length(most=128)] = field(default="", metadata=ADDED_LATER)


def _check_network(network: str, architecture: Architecture | None) -> Iterator[str]:
    if network and architecture is not None:
        yield "a profile declares an architecture and a network of its own, but must name one of both"


def _check_architecture(architecture: Architecture | None) -> Iterator[str]:
    architecture_bytes = 0 if architecture is None else len(canonical_json(architecture))
    if architecture_bytes > MAX_ARCHITECTURE_BYTES:
        yield f"architecture has {architecture_bytes} bytes, but may have {MAX_ARCHITECTURE_BYTES} at most"
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
        sample_count: of its data.
        class_counts: samples of each class; empty where labels are numbers.
        input_shape: of one sample.
        memory_total_bytes: of the device.
        memory_fraction: fraction of free memory that it gives to training, above 0, at most 1.
        max_training_bytes: the most that it gives to training, 1 or more; None is no limit.
        software: versions by name; operators: that its runtime has; empty lists nothing, and every program is tried.
        macs_per_s: multiply-accumulates that it trains with in a second, above 0; None is unknown.
        architecture: the submodel that it has and wants to train, for methods that go by what devices declare; an ack
            of this message answers it. None declares nothing, and no ack comes.
        network: in place of that a network of its own, as the text of a JSON object: its settings, as a run's `[model]`
            has them. An ack answers it likewise; empty declares nothing.
        class_names: of the classes that are counted, in their order: the device maps its data to a run's classes by
            these names; empty where its data number classes as the run does.
        other_input_shapes: of one sample, as the device can give it, too; pictures as gray and as coloured ones.
        packing_width: how many outputs its kernels for products take at once; None is the usual number.
        held_out_count: samples of its held-out data, which it never trains on and evaluates on; 0 where it has none.
        inputs: what all values of its samples are like; None where it does not tell.
        sizes_differ: its pictures have several sizes, and `input_shape` is that of most.
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


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Telemetry:
    """The current resources of a device. One is due for every round, as the answer to its announcement.

    Attributes:
        run_id: the run whose round it answers; None outside rounds.
        round: the round that it answers; None outside rounds.
        log_time_s: the time in the replayed log at which it was read; None for a live reading.
        reading: what was measured or replayed.
        memory_budget_bytes: what this device gives to training: its fraction of free memory, at most its limit, and
            less since a training killed its process.
        attempt: of the announcement that it answers.
        log_low: what its log has but for the fraction of time that the announcement names; None where nothing is told.
        disk_budget_bytes: what a task may take of its disk, as `subfleet.protocol.disk` counts; None is unknown.
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
    """The state of the run (retained, to everyone).

    Attributes:
        phase: "measure" asks for telemetry, "train" says that tasks are out, "finished" that the run is over.
        log_time_s: where replayed logs are to be read in this round; None for a live run.
        deadline_s: seconds after which the phase closes without those who are missing.
        attempt: number of earlier attempts of the round, which aggregated nothing.
        log_quantile: devices that replay a log tell what it has but for this fraction of its time; None asks for
            nothing.
        sample_bytes: what a sample takes in memory once the run's transform has brought it to one size; 0 where samples
            take what they took when they were read.
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


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Ack:
    """Ends an exchange: only now may the sender forget the message `of`.

    Attributes:
        status: "accepted" (and stored), "duplicate" (was accepted before) or "refused" (do not send it again).
        reason: for "refused", why; else, of telemetry, why the device is given no task in that round.
        problem: for a profile whose declared architecture is refused, why; else None.
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
    """Requests ranges of a blob. At most a window of them is outstanding."""

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
    """Claims a lock (retained, on the lock's topic): that of a fleet's server, or of a device's id.

    Attributes:
        session_id: of this start of the process.
        holder: what it says of itself: the run that it serves, the device's id.
        since_s: Unix time at which the session began, in seconds; of two the earlier one stays.
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
        payload: what was received.
        expected: the kind that the topic promises; another kind is refused.

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
    return from_plain(MESSAGES[kind], _clean_texts(kind, plain) if may_act(text) else plain)


def _clean_texts(kind: str, plain: dict[str, Any]) -> Any:
    """Remove terminal control characters: both sides write each other's texts into their logs."""
    try:
        return check_texts(plain, kind)
    except RecursionError as error:
        raise ProtocolError("a control message is too deep") from error


def text_bytes(payload: bytes | memoryview) -> int:
    """Compute a message's length as JSON, at most the limit; a compressed one has it in its last bytes."""
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
        raise ProtocolError("a compressed message is shorter or longer than it says")
    return text
