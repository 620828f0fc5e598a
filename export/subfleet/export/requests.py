"""Requests to the exporter: plain data with a content id, so that equal requests are exported once."""

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
from subfleet.protocol.model_notes import list_notes
from subfleet.protocol.schema import ADDED_LATER, canonical_json, to_plain
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings
from subfleet.protocol.transform import DataTransform

MODEL_SUFFIXES: Mapping[str, str] = MappingProxyType({"onnx": ".onnx", "executorch": ".pte", "torch": ".safetensors"})
"""File name extensions of inference models, by target."""


def _content_id(request: "TrainRequest | EvaluateRequest | InferRequest") -> str:
    plain = to_plain(request)
    for architecture in (plain["architecture"], plain.get("student")):
        if architecture is not None:
            architecture.pop("name")  # a display name changes nothing in the program
    return hashlib.sha256(canonical_json([request.TYPE, plain, tool_versions(request.target)])).hexdigest()


def _check_parts(one_part: bool, accumulate: bool) -> Iterator[str]:
    if one_part and not accumulate:
        yield "one_part is set without accumulate, but describes its micro-batches; set accumulate too"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_parts)
class TrainRequest:
    """A request for a training program, which depends on the submodel's shape but not on its weights.

    Attributes:
        model: the elastic network.
        architecture: the submodel.
        target: a name in `subfleet.export.targets.TARGETS`, "onnx" or "executorch", or "torch".
        batch_size: samples of one step, 1 or more.
        objective: the objective to minimise.
        optimiser: the optimiser's settings.
        accumulate: whether the program sums the gradients of micro-batches; `batch_size` is then the micro-batch's.
        recompute: whether activations are recomputed instead of kept; see `subfleet.export.steps.recompute`.
        one_part: with accumulate, whether each batch is a single micro-batch, so that BatchNorm can use its statistics.
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
        """The packed program's name in a cache folder."""
        return f"{self.program_id}.program"


def _check_objective(objective: ObjectiveSettings) -> Iterator[str]:
    if objective != objective.plain:  # otherwise equal programs would have different ids
        yield "the objective of an evaluation has training terms; use objective.plain"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_objective)
class EvaluateRequest:
    """A request for a program that evaluates a submodel on labelled samples; it depends on the submodel's shape only.

    Attributes:
        model: the elastic network.
        architecture: the submodel.
        target: as in `TrainRequest`.
        batch_size: samples of one step, 1 or more.
        objective: a plain objective: `ObjectiveSettings.plain` of the training objective.
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
        """The packed program's name in a cache folder."""
        return f"{self.program_id}.program"


ProgramRequest = TrainRequest | EvaluateRequest
"""A request for a packed program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """A request for the planned memory of the training programs of all submodels, for one target.

    Attributes:
        training: a request for one of them; its submodel does not matter.
    """

    TYPE: ClassVar[str] = "estimate"
    training: TrainRequest

    @property
    def target(self) -> str:
        """As in `TrainRequest`."""
        return self.training.target

    @property
    def program_id(self) -> str:
        """64 hexadecimal digits: the same for the same request and tools, and different from any program's."""
        training = replace(self.training, architecture=Architecture())
        return hashlib.sha256(f"{self.TYPE}/{training.program_id}".encode()).hexdigest()

    @property
    def file_name(self) -> str:
        """The cost estimates' name in a cache folder."""
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
    """A request for an inference model that contains its weights.

    Attributes:
        model: the elastic network.
        architecture: the submodel.
        target: as in `TrainRequest`.
        weights_sha256: content id of the container with the submodel's own weights.
        quantisation: "dynamic" and "static" store weights as 8-bit integers; activations are quantised in every run, or
            by ranges measured on samples.
        samples_sha256: with quantisation, the content id of the samples; see
            `subfleet.export.quantisation.models.samples_of`.
        classes: class names in the network's order, which the model carries; empty if classes are numbered.
        objective: the training objective, which the model carries; it defines the meaning of the outputs.
        transform: the transform of the training samples, which the model carries; None if there was none.
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
        """What the model file says about itself, for its users."""
        return list_notes(self.classes, self.objective, self.transform)

    @property
    def program_id(self) -> str:
        """64 hexadecimal digits: the same for the same request and tools."""
        return _content_id(self)

    @property
    def file_name(self) -> str:
        """The model's name in a cache folder, with the extension that its runtime expects."""
        return self.program_id + MODEL_SUFFIXES[self.target]


AnyRequest = TrainRequest | EvaluateRequest | InferRequest | EstimateRequest
"""Any request to the exporter."""
