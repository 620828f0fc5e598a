"""What a device needs to know of a program, as plain data; and the seam to what runs it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.chains import Chain
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.jobs import EvaluateJob, ScoreJob, TrainJob, TrainResult
from subfleet.protocol.memory import MemoryPlan
from subfleet.protocol.schema import ADDED_LATER, canonical_json, from_plain, parse_json
from subfleet.protocol.tensors import Tensor, decode_container, encode_container

__all__ = [
    "DataSummary",
    "EvaluateJob",
    "EvaluationResult",
    "PieceProgram",
    "Prediction",
    "Program",
    "ProgramManifest",
    "ProgramRef",
    "ScoreJob",
    "TrainJob",
    "TrainResult",
    "Trainer",
    "ValueInfo",
    "decode_program",
    "encode_program",
    "program_id_of",
]

Role = Literal[
    # Fed with every step.
    "input",  # samples, (batch, *sample shape); F32, or I64 indices such as tokens
    "label",  # I64 class indices or F32 targets, (batch, ...); an index below 0 is not counted
    "sample_mask",  # 1 for a real sample, 0 for padding, (batch,)
    "learning_rate",  # scalar
    "random",  # uniform in [0, 1), fresh in every step: dropout's randomness
    "class_mask",  # 1 for a class that the client holds, 0 for one that it lacks, (classes,)
    "coefficient",  # scalar of `TrainingSettings` that has the value's name: proximal_mu or distillation_weight
    "frozen",  # a weight that is trained by nobody: it is given, and is no part of an update
    "anchor",  # a parameter as it was before the first step, for the proximal term
    "batch_weight",  # scalar: the count of the whole batch that a micro-batch is part of
    "apply",  # scalar: 1 in the last micro-batch of a batch, which takes the optimiser's step; else 0
    # Between the pieces of a chain.
    "features",  # what a link reads or gives, (batch, ...)
    "features_gradient",  # the loss' gradient by it
    "gradient_scale",  # scalar: what clipping multiplies all gradients of a path with
    # Carried from step to step: an input, and as an output the same thing after the step.
    "parameter",  # a weight
    "buffer",  # what a layer keeps besides its weights, such as a running mean
    "optimiser_state",  # zero before the first step; `tensor` is empty where it belongs to none
    "gradient",  # summed over the micro-batches so far; zero before the first, and again after the last
    # Read after every step.
    "loss",  # scalar, mean over `count`; of a micro-batch, its fraction of the whole batch's mean
    "correct",  # scalar, how many of `count` were predicted rightly before the step; 0 where that means nothing
    "count",  # scalar, how many labels counted: real samples, or the real tokens of real samples
    "squares",  # scalar, sum of the squares of the losses of `count` labels, where the objective asks for it
    "logits",  # (batch, ...)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInfo:
    """One input or output of a program.

    Attributes:
        name: the program's own name of it.
        dtype: as in the tensor container, such as "F32".
        shape: sizes; the batch is a fixed number.
        role: what it is for.
        tensor: the submodel's tensor that a parameter, buffer, anchor, gradient or optimiser state belongs to.
        limit: exclusive upper bound of the indices in an I64 input or label, so that data that do not fit are refused
            before a program reads beyond a table; 0 where there is none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    tensor: str = ""
    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceProgram:
    """One program of a chain's piece.

    Attributes:
        name: in the chain's body; see `subfleet.protocol.chains.program_name`.
        inputs: in the order in which it takes them; `tensor` is the name after the operator's prefix.
        outputs: in the order in which it gives them.
    """

    name: str
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramManifest:
    """Everything a trainer must know of a program besides its bytes.

    Attributes:
        program_id: content id of the request that made it: shape, objective, optimiser, batch, target, versions.
        target: "onnx" or "executorch".
        purpose: "train", "infer" or "evaluate".
        batch_size: samples of one step; a smaller last batch is padded and masked.
        inputs: in the order in which the program takes them.
        outputs: in the order in which it gives them.
        memory: what it is planned to take on a device.
        max_abs_diff: largest difference of any number from PyTorch's, found when it was written; as a fraction of the
            largest number of its tensor where that is above 1.
        versions: of the tools that wrote it.
        operators: that its runtime must have, sorted, such as "Conv" or "aten::add.out"; empty where it is not told. Of
            a chain, those of the links that have no choice.
        chain: of a supernet's program the links that its pieces are chained by; `inputs` and `outputs` are then those
            of all of them together. None in a program that is one piece.
        pieces: the programs in a chain's body.
    """

    program_id: str
    target: str
    purpose: Literal["train", "infer", "evaluate"]
    batch_size: int
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    memory: MemoryPlan
    max_abs_diff: float
    versions: dict[str, str] = field(default_factory=dict)
    operators: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    chain: Chain | None = field(default=None, metadata=ADDED_LATER)
    pieces: tuple[PieceProgram, ...] = field(default=(), metadata=ADDED_LATER)

    @property
    def planned_peak_bytes(self) -> int:
        """The largest growth of a trainer's process: all parts of the memory plan."""
        return self.memory.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program and its manifest; they travel as one blob. A chain's body is a tensor container of its programs."""

    manifest: ProgramManifest
    body: bytes | memoryview


_BODY = "program"
_DIGEST = "sha256"
_MANIFEST = "manifest"
_MAX_MANIFEST_BYTES = 4 * 2**20


def encode_program(program: Program) -> bytes:
    """Pack a program as a tensor container: manifest and digest as metadata, the bytes as one U8 tensor."""
    body = Tensor(name=_BODY, dtype="U8", shape=(len(program.body),), data=program.body)
    metadata = {_MANIFEST: canonical_json(program.manifest).decode(), _DIGEST: hashlib.sha256(program.body).hexdigest()}
    return encode_container([body], metadata)


def decode_program(buffer: bytes | memoryview) -> Program:
    """Unpack a program. Runtimes survive most damaged programs, not all: none is handed to them.

    Raises:
        ProtocolError: the bytes are no packed program, or were damaged after they were packed.
    """
    body, plain = _unpack(buffer)
    return Program(manifest=from_plain(ProgramManifest, plain), body=body)


def program_id_of(buffer: bytes | memoryview) -> str:
    """The id of a whole packed program, without reading all that its manifest says.

    Raises:
        ProtocolError: the bytes are no packed program, or were damaged after they were packed.
    """
    _, plain = _unpack(buffer)
    program_id = plain.get("program_id") if isinstance(plain, dict) else None
    if not isinstance(program_id, str):
        raise ProtocolError(f"a program's manifest must name its id, but has {program_id!r:.80}")
    return program_id


def _unpack(buffer: bytes | memoryview) -> tuple[memoryview | bytes, Any]:
    """A packed program's bytes and its manifest's JSON."""
    container = decode_container(buffer)
    if set(container.tensors) != {_BODY} or set(container.metadata) != {_MANIFEST, _DIGEST}:
        raise ProtocolError("a packed program must hold one tensor 'program' and the metadata 'manifest' and 'sha256'")
    body = container.tensors[_BODY].data
    if hashlib.sha256(body).hexdigest() != container.metadata[_DIGEST]:
        raise ProtocolError("the program's bytes are not those of its digest: they were damaged; fetch it again")
    return body, parse_json(container.metadata[_MANIFEST].encode(), max_bytes=_MAX_MANIFEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRef:
    """Names a program and the blob that holds it."""

    program_id: str
    target: str
    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """What is known of a client's data: counts, shapes and sizes, never samples.

    Attributes:
        sample_count: 1 or more.
        input_shape: of one sample.
        class_counts: labels of each class, where classes have names in their order, else up to the last one that
            occurs; empty where labels are numbers.
        data_bytes: what the samples and their labels take in memory while the device trains, whatever submodel.
        class_names: of the classes that are counted; empty where the data number them.
        other_input_shapes: of one sample, as it can be given, too: pictures are gray or coloured as a model takes them.
        inputs: what all values of the samples are like; None where nobody has looked.
        sizes_differ: pictures have several sizes, and `input_shape` is that of most.
        streams: only what a transform makes of the samples is ever in memory together: they are read one by one, or
            were transformed before.
    """

    sample_count: int
    input_shape: tuple[int, ...]
    class_counts: tuple[int, ...]
    data_bytes: int = 0
    class_names: tuple[str, ...] = ()
    other_input_shapes: tuple[tuple[int, ...], ...] = ()
    inputs: InputStatistics | None = None
    sizes_differ: bool = False
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Outputs of an inference model on a data set.

    Attributes:
        labels: predicted classes, one for each label of the data set, in its order; for targets of 0 and 1, which one.
        metrics: of the model's kind of task, on these labels, by their names in `subfleet.protocol.task_kinds`.
        headline: which of them it is judged by.
        classes: the model's names of classes, in its order; empty where it numbers them.
        numbers: in place of labels, what a model of numbers predicts.
    """

    labels: tuple[int, ...]
    metrics: Mapping[str, float]
    headline: str = "accuracy"
    classes: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """Fraction of the labels, other than those of nothing, that were predicted; None where that means nothing."""
        return self.metrics.get("accuracy")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each predicted class: its number, where the model has none."""
        return tuple(self.classes[label] if self.classes else str(label) for label in self.labels)


class Trainer(Protocol):
    """The seam between the agent and a runtime. The agent makes it by entry-point name (group `subfleet.trainers`)."""

    @property
    def target(self) -> str:
        """The kind of program that it runs."""
        ...

    @property
    def suffix(self) -> str:
        """File ending of its inference models."""
        ...

    @property
    def providers(self) -> tuple[str, ...]:
        """What can compute, such as "cpu" and "cuda"; the first one does where nothing is said.

        What makes a trainer of more than one takes the argument `provider`.
        """
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that is kept between two trainings. The next one uses it, or gives it back before it takes more."""
        ...

    def describe_runtime(self) -> str:
        """Name and version of the runtime, and what it computes with, once it is loaded.

        Raises:
            MissingExtraError: it is not installed, or cannot be loaded.
            ConfigError: it lacks the provider.
        """
        ...

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set. Raises DataError where it cannot be used."""
        ...

    def train(self, job: TrainJob, stopped: Callable[[], bool]) -> TrainResult:
        """Train; checks `stopped` between steps.

        Raises:
            MemoryLimitError: the process grew beyond the limit.
            LoadError: the runtime refuses the program.
            TrainingError: the program failed, or was stopped.
            DataError: the data do not fit the program.
        """
        ...

    def score(self, job: ScoreJob, stopped: Callable[[], bool]) -> float:
        """The ZiCo score of a candidate before training; raises as `train`."""
        ...

    def evaluate(self, job: EvaluateJob, stopped: Callable[[], bool]) -> EvaluationResult:
        """How good a model is on held-out data; nothing is trained. Raises as `train`."""
        ...

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """Run an inference model (a plain .onnx or .pte file) over a data set."""
        ...
