"""What of a run does not go with its kind of task: said when its file is read. Pure."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from subfleet.elastic.network import predicted_places
from subfleet.protocol.limits import MAX_COUNTED_CLASSES
from subfleet.protocol.metric_sums import MAX_MEASURED_OUTPUTS

if TYPE_CHECKING:
    from subfleet.settings.run import Run

__all__ = ["kind_problem", "label_shape_of"]

_LEAST_CLASSES = 2


def label_shape_of(run: "Run") -> tuple[int, ...] | None:
    """Shape of one sample's label; None where the model's family does not say what it has outputs for."""
    kind, model = run.training.objective.kind, run.model
    places = predicted_places(model) or (None if kind.places == "any" else kind.places)
    return None if places is None else kind.label_shape(model.input_shape, model.class_count, places)


def kind_problem(run: "Run") -> str:
    """The first thing that does not go with the objective, with a remedy; empty where all does."""
    return next(_problems(run), "")


def _problems(run: "Run") -> Iterator[str]:
    yield from _of_model(run)
    yield from _of_data(run)
    yield from _of_method(run)
    kind = run.training.objective.kind
    if run.deploy_quantisation != "none" and kind.name != "classification":
        yield (
            f"deploy_quantisation is {run.deploy_quantisation!r}, but 8-bit models are judged by the class of each "
            f"sample, and objective {run.training.objective.name!r} has others; set deploy_quantisation = 'none'"
        )


def _of_model(run: "Run") -> Iterator[str]:
    objective, kind, model = run.training.objective.name, run.training.objective.kind, run.model
    if kind.over_classes and model.class_count < _LEAST_CLASSES:
        yield (
            f"model.class_count is {model.class_count}, but one class alone is always right; give it 2 or more, or "
            "set training.objective.name = 'binary_cross_entropy' or 'mean_squared_error'"
        )
    most = MAX_MEASURED_OUTPUTS if kind.labels == "numbers" else MAX_COUNTED_CLASSES
    if (kind.by_class or kind.labels == "numbers") and model.class_count > most:
        yield (
            f"model.class_count is {model.class_count}, but objective {objective!r} tells what it is judged by for "
            f"{most} outputs at most; predict fewer"
        )
    places = predicted_places(model)
    if places is not None and kind.places not in ("any", places):
        fitting = {"sample": "cross_entropy", "token": "next_token", "pixel": "dense_cross_entropy"}[places]
        yield (
            f"training.objective.name is {objective!r}, which needs a class of each {kind.places}, but family "
            f"{model.TYPE!r} has outputs of each {places}; set it to {fitting!r}, or take another family"
        )


def _of_data(run: "Run") -> Iterator[str]:
    objective, kind, model = run.training.objective.name, run.training.objective.kind, run.model
    if run.data.classes and not kind.over_classes:
        yield f"data.classes are named, but objective {objective!r} knows none; leave them out"
    elif run.data.classes and len(run.data.classes) != model.class_count:
        yield f"data.classes names {len(run.data.classes)}, but must name all {model.class_count} of the model"
    attacks = (device.attack for device in run.fleet.devices)
    odd = next((one for one in attacks if one is not None and one.TYPE == "backdoor"), None)
    if odd is not None and kind.name != "classification":
        yield f"an attack is 'backdoor', but objective {objective!r} has no class of each sample; leave it out"
    by_label = run.data.partition.name in ("dirichlet", "pathological", "shard")
    if by_label and run.fleet.devices and not any(device.data for device in run.fleet.devices):
        one_number = not kind.over_classes and label_shape_of(run) == (1,)
        if kind.name != "classification" and not one_number:
            yield (
                f"data.partition is {run.data.partition.name!r}, which goes by one class or number of each sample, but "
                f"objective {objective!r} with {model.class_count} outputs has others; take 'iid' or 'natural'"
            )


def _of_method(run: "Run") -> Iterator[str]:
    objective, kind = run.training.objective.name, run.training.objective.kind
    distils = run.roles.techniques.distillation
    if distils is not None and distils.iterations and not kind.over_classes:
        yield (
            "in-place distillation teaches subnets the classes that the whole model predicts, but objective "
            f"{objective!r} has none; set distillation.iterations = 0"
        )
    search = run.roles.networks.path_search
    if search is not None and search.federated is not None and kind.labels == "numbers":
        yield (
            f"devices are to score paths, but the errors of objective {objective!r} have no bound that one device's "
            "word could be held to; set method.search.scoring = 'server'"
        )
    if getattr(run.method, "stop_rounds", 0) and "accuracy" not in kind.metrics:
        yield (
            f"method {run.method.TYPE!r} ends a run where accuracy no longer gains, but objective {objective!r} has "
            "none; set method.stop_rounds = 0"
        )
