"""Rules about settings of a run that must agree, checked when its file is read."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from subfleet.elastic.families import AnyFamily, get_predicted_places
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.methods import AnyMethod
from subfleet.methods.combining import explain_rounds, find_conflicts
from subfleet.methods.techniques import NormPolicy
from subfleet.protocol.bounds import Rules
from subfleet.protocol.limits import MAX_COUNTED_CLASSES
from subfleet.protocol.metric_sums import MAX_MEASURED_OUTPUTS
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.transform import DataTransform
from subfleet.settings.fleet import FleetSettings
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import Evaluations, FirstWeights, ModelOf
from subfleet.tasks import shape_problem

if TYPE_CHECKING:
    from subfleet.settings.run import Run

_LEAST_CLASSES = 2


def find_label_shape(training: TrainingSettings, model: AnyFamily) -> tuple[int, ...] | None:
    """The shape of one label; None if the network family does not determine it."""
    kind = training.objective.kind
    places = get_predicted_places(model) or (None if kind.places == "any" else kind.places)
    return None if places is None else kind.label_shape(model.input_shape, model.class_count, places)


def _check_devices(fleet: FleetSettings, min_clients: int) -> Iterator[str]:
    devices = len(fleet.expand_devices())
    if devices and devices < min_clients:
        yield f"min_clients is {min_clients}, but the fleet has {devices} devices; lower it"


def _check_norms(
    norms: NormPolicy, calibrate_every: int, model: AnyFamily, training: TrainingSettings
) -> Iterator[str]:
    if calibrate_every and norms != "calibrated":
        yield (
            f"calibrate_every is {calibrate_every} and norms are {norms!r}, but it must be 0, or above 0 with norms = "
            "'calibrated'"
        )
    if norms == "calibrated" and (model.norm != "batch" or training.micro_batch_size):
        yield (
            f"norms are 'calibrated' with model.norm {model.norm!r} and micro_batch_size {training.micro_batch_size}, "
            "but devices measure norms of kind 'batch' on whole batches"
        )


def find_transform_problem(transform: DataTransform, input_shape: tuple[int, ...]) -> str:
    """Why a model with inputs of a shape cannot take the output of a transform; empty if it can."""
    if not transform.fixes_size:
        return ""
    size = transform.cut_size(transform.compute_scaled_size(1, 1))
    channels = (transform.channels,) if transform.channels else (1, 3, *input_shape[:1])
    problems = [shape_problem((count, *size), input_shape) for count in channels]
    return f"data.transform makes samples that {problems[0]}; change resize, crop or channels" if all(problems) else ""


def _check_transform(data: DataSettings, model: AnyFamily) -> Iterator[str]:
    if data.transform is not None and (problem := find_transform_problem(data.transform, model.input_shape)):
        yield problem


def _check_combination(record: "Run") -> Iterator[str]:
    validated = record.data.validation_samples > 0
    conflicts = find_conflicts(record.method, record.training, record.model, record.techniques, validated=validated)
    yield from islice(conflicts, 1)  # the others often follow from the first


def _check_evaluations(method: AnyMethod, evaluation: Evaluations) -> Iterator[str]:
    if method.roles().selector.needs_evaluations and evaluation.every != 1:
        yield (
            f"evaluation.every is {evaluation.every}, but method {method.TYPE!r} chooses by what devices find after "
            "every round; set it to 1"
        )


def _check_first_weights(
    method: AnyMethod, model_of: ModelOf | None, first_weights: FirstWeights | None
) -> Iterator[str]:
    if model_of is not None and first_weights is not None:
        yield "first_weights and model_of are both set; leave one out, or set model_of.weights"
    given = first_weights is not None or (model_of is not None and model_of.weights)
    if given and method.roles().networks.begin is not None:
        yield (
            f"the model begins with given weights, but method {method.TYPE!r} begins with another one, which the "
            "weakest device can carry; set method.first to 'configured', or leave the weights out"
        )


def _check_frozen(
    method: AnyMethod,
    model: AnyFamily,
    networks: Mapping[str, AnyFamily],
    model_of: ModelOf | None,
    first_weights: FirstWeights | None,
) -> Iterator[str]:
    explicit = [own for own in (model, *networks.values()) if isinstance(own, Recorded)]
    awaited = [name for own in explicit for name in own.awaited]
    if awaited and model_of is None and first_weights is None:
        yield (
            f"training leaves {awaited[0]!r} as it is, but the run has no weights to begin with; set "
            "model.weights to a safetensors file, or train these layers"
        )
    frozen = [name for own in explicit for name in own.frozen]
    if frozen and method.roles().aggregator.transform is not None:
        yield (
            f"method {method.TYPE!r} scales or maps every weight that clients send, but training leaves "
            f"{len(frozen)} tensors as they are, such as {frozen[0]!r}; choose another method, "
            "train them, or register buffers with persistent=False"
        )


def _check_model(training: TrainingSettings, model: AnyFamily) -> Iterator[str]:
    objective, kind = training.objective.name, training.objective.kind
    if kind.over_classes and model.class_count < _LEAST_CLASSES:
        yield (
            f"model.class_count is {model.class_count}, but with one class every prediction is correct; set 2 or more, "
            "or set training.objective.name = 'binary_cross_entropy' or 'mean_squared_error'"
        )
    most = MAX_MEASURED_OUTPUTS if kind.labels == "numbers" else MAX_COUNTED_CLASSES
    if (kind.by_class or kind.labels == "numbers") and model.class_count > most:
        yield (
            f"model.class_count is {model.class_count}, but objective {objective!r} supports at most {most} outputs; "
            "lower it"
        )
    loss = model.record().loss if isinstance(model, Recorded) else None
    if loss is not None and bool(loss.symbols) != kind.over_classes:
        expected, given = ("class indices", "numbers") if loss.symbols else ("numbers", "class indices")
        yield (
            f"model.loss takes {expected} as labels, but those of objective {objective!r} are {given}; change one of "
            "the two"
        )
    if loss is not None and training.objective.label_smoothing:
        yield "training.objective.label_smoothing is set, but model.loss computes the whole loss; smooth labels there"
    places = get_predicted_places(model)
    if places is not None and kind.places not in ("any", places):
        fitting = {"sample": "cross_entropy", "token": "next_token", "pixel": "dense_cross_entropy"}[places]
        yield (
            f"training.objective.name is {objective!r}, which needs a class for each {kind.places}, but family "
            f"{model.TYPE!r} has outputs for each {places}; set it to {fitting!r}, or choose another family"
        )


def _check_data(
    training: TrainingSettings, model: AnyFamily, data: DataSettings, fleet: FleetSettings
) -> Iterator[str]:
    objective, kind = training.objective.name, training.objective.kind
    if data.classes and not kind.over_classes:
        yield f"data.classes is set, but objective {objective!r} has no classes; omit it"
    elif data.classes and len(data.classes) != model.class_count:
        yield f"data.classes names {len(data.classes)}, but must name all {model.class_count} of the model"
    backdoor = any(device.attack is not None and device.attack.TYPE == "backdoor" for device in fleet.devices)
    if backdoor and kind.name != "classification":
        yield f"an attack is 'backdoor', but objective {objective!r} has no class for each sample; leave it out"
    by_label = data.partition.name in ("dirichlet", "pathological", "shard")
    if by_label and fleet.devices and not any(device.data for device in fleet.devices):
        one_number = not kind.over_classes and find_label_shape(training, model) == (1,)
        if kind.name != "classification" and not one_number:
            yield (
                f"data.partition is {data.partition.name!r}, which needs one class or number for each sample, but "
                f"objective {objective!r} with {model.class_count} outputs has other labels; set 'iid' or 'natural'"
            )


def _check_deployment(training: TrainingSettings, deploy_quantisation: str) -> Iterator[str]:
    objective = training.objective
    if deploy_quantisation != "none" and objective.kind.name != "classification":
        yield (
            f"deploy_quantisation is {deploy_quantisation!r}, but 8-bit models are evaluated by the class of each "
            f"sample, and objective {objective.name!r} has other labels; set deploy_quantisation = 'none'"
        )


def _check_method(record: "Run") -> Iterator[str]:
    objective, kind = record.training.objective.name, record.training.objective.kind
    distils = record.roles.techniques.distillation
    if distils is not None and distils.iterations and not kind.over_classes:
        yield (
            "in-place distillation teaches submodels the classes that the whole model predicts, but objective "
            f"{objective!r} has none; set distillation.iterations = 0"
        )
    search = record.roles.networks.path_search
    if search is not None and search.federated is not None and kind.labels == "numbers":
        yield (
            f"devices are to score paths, but the errors of objective {objective!r} have no bound, so one device's "
            "scores could decide; set method.search.scoring = 'server'"
        )
    if getattr(record.method, "stop_rounds", 0) and "accuracy" not in kind.metrics:
        yield (
            f"method {record.method.TYPE!r} ends a run when accuracy stops improving, but objective {objective!r} has "
            "no accuracy; set method.stop_rounds = 0"
        )


def _check_asynchronous(record: "Run") -> Iterator[str]:
    settings = record.asynchronous
    if settings is None:
        return
    if hindrance := explain_rounds(record.roles):
        yield (
            f"rounds are asynchronous, but method {record.method.TYPE!r} {hindrance}; choose another method, or leave "
            "[asynchronous] out"
        )
    devices = len(record.fleet.expand_devices())
    if devices and settings.buffer > devices:
        yield (
            f"asynchronous.buffer is {settings.buffer}, but the fleet has {devices} devices, each of which counts once "
            "in a buffer; lower it"
        )
    if record.clients_per_round:
        yield (
            f"clients_per_round is {record.clients_per_round}, but in asynchronous rounds asynchronous.concurrency "
            "says how many devices train; leave clients_per_round out"
        )
    if not record.strict:
        yield (
            f"quorum is {record.quorum:g}, but asynchronous rounds close when their buffer is full; leave quorum out, "
            "or lower asynchronous.buffer"
        )
    if record.norms == "calibrated":
        yield (
            "norms are 'calibrated', which devices measure together, but rounds are asynchronous; set norms to "
            "'recalibrated', or leave [asynchronous] out"
        )
    if record.evaluation.every:
        yield (
            f"evaluation.every is {record.evaluation.every}, but in asynchronous rounds devices train while the model "
            "changes; set it to 0, as the server evaluates every round and devices the last one"
        )


RUN_RULES: Rules = (
    _check_devices,
    _check_norms,
    _check_transform,
    _check_combination,
    _check_evaluations,
    _check_asynchronous,
    _check_first_weights,
    _check_frozen,
    _check_model,
    _check_data,
    _check_deployment,
    _check_method,
)
"""The rules that a run is checked by, beside the bounds of its fields."""
