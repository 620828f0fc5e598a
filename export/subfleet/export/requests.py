"""What is asked of the exporter: plain data with a content id, so that equal requests are exported once."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.export.versions import tool_versions
from subfleet.protocol.bounds import checked
from subfleet.protocol.class_names import ClassNames
from subfleet.protocol.limits import Positive
from subfleet.protocol.model_notes import notes_of
from subfleet.protocol.schema import ADDED_LATER, canonical_json, to_plain
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings
from subfleet.protocol.transform import DataTransform

__all__ = [
    "MODEL_SUFFIXES",
    "AnyRequest",
    "EstimateRequest",
    "EvaluateRequest",
    "InferRequest",
    "ProgramRequest",
    "TrainRequest",
]

MODEL_SUFFIXES: Mapping[str, str] = MappingProxyType({"onnx": ".onnx", "executorch": ".pte", "torch": ".safetensors"})
"""File endings of inference models, by target."""


def _content_id(request: "TrainRequest | EvaluateRequest | InferRequest") -> str:
    plain = to_plain(request)
    for architecture in (plain["architecture"], plain.get("student")):
        if architecture is not None:
            architecture.pop("name")  # a display name changes nothing in the program
    return hashlib.sha256(canonical_json([request.TYPE, plain, tool_versions(request.target)])).hexdigest()


def _check_parts(one_part: bool, accumulate: bool) -> Iterator[str]:
    if one_part and not accumulate:
        yield "one_part is set, but says how many micro-batches a batch has; set accumulate, too"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_parts)
class TrainRequest:
    """A training program: it depends on the submodel's shape, never on its weights.

    Attributes:
        model: the elastic network.
        architecture: the submodel of it.
        target: a name in `subfleet.export.targets.TARGETS`, "onnx" or "executorch", or "torch".
        batch_size: samples of one step, 1 or more.
        objective: what is minimised.
        optimiser: its settings.
        accumulate: whether the program takes micro-batches, whose gradients it sums; `batch_size` is then theirs.
        recompute: whether activations are computed twice instead of kept; see `subfleet.export.steps.recompute`.
        one_part: with accumulate, whether each batch is a single micro-batch, by whose statistics BatchNorm normalises.
        student: with distillation "self" the nested submodel, of the same network and within `architecture`.
    """

    TYPE: ClassVar[str] = "train"
    model: AnyFamily
    architecture: Architecture
    target: str
    batch_size: Positive
    objective: ObjectiveSettings
    optimiser: OptimiserSettings
    accumulate: bool = False
    recompute: bool = False
    student: Architecture | None = None
    one_part: bool = field(default=False, metadata=ADDED_LATER)

    @property
    def program_id(self) -> str:
        """64 hexadecimal digits: the same for the same request and tools."""
        return _content_id(self)

    @property
    def file_name(self) -> str:
        """Of the packed program in a cache folder."""
        return f"{self.program_id}.program"


def _check_objective(objective: ObjectiveSettings) -> Iterator[str]:
    if objective != objective.plain:  # else programs that are alike would have different ids
        yield "the objective of an evaluation has terms of training; use objective.plain"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_objective)
class EvaluateRequest:
    """A program that tells how good a submodel is on labelled samples: it depends on the submodel's shape alone.

    Attributes:
        model: the elastic network.
        architecture: the submodel of it.
        target: as in `TrainRequest`.
        batch_size: samples of one step, 1 or more.
        objective: what is told, a plain one: `ObjectiveSettings.plain` of what is trained.
    """

    TYPE: ClassVar[str] = "evaluate"
    model: AnyFamily
    architecture: Architecture
    target: str
    batch_size: Positive
    objective: ObjectiveSettings

    @property
    def program_id(self) -> str:
        """64 hexadecimal digits: the same for the same request and tools."""
        return _content_id(self)

    @property
    def file_name(self) -> str:
        """Of the packed program in a cache folder."""
        return f"{self.program_id}.program"


ProgramRequest = TrainRequest | EvaluateRequest
"""What asks for a packed program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """What the training programs of all submodels would be planned to take, for one target.

    Attributes:
        training: what would be asked for one of them; its submodel does not matter.
    """

    TYPE: ClassVar[str] = "estimate"
    training: TrainRequest

    @property
    def target(self) -> str:
        """As in `TrainRequest`."""
        return self.training.target

    @property
    def program_id(self) -> str:
        """64 hexadecimal digits: the same for the same request and tools, and no program's."""
        anyone = replace(self.training, architecture=Architecture())
        return hashlib.sha256(f"{self.TYPE}/{anyone.program_id}".encode()).hexdigest()

    @property
    def file_name(self) -> str:
        """Of the cost estimates in a cache folder."""
        return f"{self.program_id}.cost estimates"


def _check_quantisation(quantisation: str, samples_sha256: str) -> Iterator[str]:
    if (quantisation == "none") != (not samples_sha256):
        yield (
            f"quantisation is {quantisation!r} and samples_sha256 {samples_sha256!r}, but 8-bit models need "
            "quantisation samples and others take none"
        )


def _check_classes(classes: tuple[str, ...], model: AnyFamily) -> Iterator[str]:
    if classes and len(classes) != model.class_count:
        yield f"there are {len(classes)} class names, but the network has {model.class_count}"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_quantisation, _check_classes)
class InferRequest:
    """An inference model with its weights inside.

    Attributes:
        model: the elastic network.
        architecture: the submodel of it.
        target: as in `TrainRequest`.
        weights_sha256: content id of the container of the submodel's own weights.
        quantisation: "dynamic" and "static" write weights as 8-bit integers, and quantise activations in every run, or
            by ranges that samples have shown.
        samples_sha256: with quantisation, the content id of the samples; see
            `subfleet.export.quantisation.models.samples_of`.
        classes: names of the classes in the network's order, which the model carries; empty where they are numbered.
        objective: that the network was trained by, which the model carries; it says what its outputs mean.
        transform: what was done to the samples that it was trained on, which the model carries; None where nothing was.
    """

    TYPE: ClassVar[str] = "infer"
    model: AnyFamily
    architecture: Architecture
    target: str
    weights_sha256: str
    quantisation: Literal["none", "dynamic", "static"] = "none"
    samples_sha256: str = ""
    classes: ClassNames = field(default=(), metadata=ADDED_LATER)
    objective: Objective = field(default="cross_entropy", metadata=ADDED_LATER)
    transform: DataTransform | None = field(default=None, metadata=ADDED_LATER)

    @property
    def notes(self) -> Mapping[str, str]:
        """What the model's file says of itself, for whoever runs it."""
        return notes_of(self.classes, self.objective, self.transform)

    @property
    def program_id(self) -> str:
        """64 hexadecimal digits: the same for the same request and tools."""
        return _content_id(self)

    @property
    def file_name(self) -> str:
        """Of the model in a cache folder; its ending is what its runtime expects."""
        return self.program_id + MODEL_SUFFIXES[self.target]


AnyRequest = TrainRequest | EvaluateRequest | InferRequest | EstimateRequest
"""Whatever is asked of the exporter."""
