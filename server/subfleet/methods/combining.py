"""Which parts of a run's configuration its method excludes, found when the configuration is read. Pure."""

from collections.abc import Iterator

from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.network import Family
from subfleet.elastic.robust_aggregation import CoordinateMedian, TrimmedMean
from subfleet.elastic.supernets import Supernet, count_choices
from subfleet.methods.aggregator import keep_aggregate, share_everything
from subfleet.methods.roles import Memory, Method, Roles
from subfleet.methods.run_networks import Networks
from subfleet.methods.selector import select_at_random
from subfleet.methods.techniques import Techniques
from subfleet.protocol.training import TrainingSettings


def find_conflicts(
    method: Method, training: TrainingSettings, model: Family, techniques: Techniques, *, validated: bool
) -> Iterator[str]:
    """The conflicts of a method with the rest of a configuration, each with a remedy; see `subfleet.settings.run.Run`.

    A technique that needs one model for all is refused with a method that has none: it would do nothing, or move a
    model that no client sees.

    Args:
        method: with its parameters.
        training: as configured.
        model: the configured one.
        techniques: the run's choice.
        validated: whether the run sets validation samples apart.
    """
    yield from _check_supernet(method, training, model, techniques, validated=validated)
    yield from _check_growth(method, model)
    yield from _check_training(method, training, model)
    yield from _check_distillation(method, techniques)
    yield from _check_personalised(method, techniques)


def explain_rounds(roles: Roles) -> str:
    """Why a method needs rounds that its clients begin and end together; empty if they may be asynchronous.

    Clients of asynchronous rounds are drawn one by one, and their changes are added to a newer model than they got. So
    each client's submodel must be a part of one model that keeps its form, and nothing may look at a round's clients
    together.
    """
    aggregator, assigner = roles.aggregator, roles.assigner
    hindrances = {
        "selects the devices of a round together": roles.selector.select is not select_at_random,
        "searches submodels for all devices of a round": assigner.search is not None,
        "has devices score candidates before a round": assigner.propose is not None,
        "has other networks from round to round": roles.networks != Networks(),
        "trains paths of a supernet": roles.training.draws_paths,
        "remembers what a round's updates have in common": roles.memory != Memory(),
        "compares the updates of a round": aggregator.transform is not None,
        "rearranges the model after each round": aggregator.after_round is not keep_aggregate,
        "has a model for each device or group of devices": aggregator.personal,
    }
    return next((words for words, applies in hindrances.items() if applies), "")


def _check_supernet(
    method: Method, training: TrainingSettings, model: Family, techniques: Techniques, *, validated: bool
) -> Iterator[str]:
    roles, name = method.roles(), f"method {method.TYPE!r}"
    choices = count_choices(model)
    if choices and not roles.training.draws_paths:
        yield (
            f"model.operators leaves {choices} blocks with a choice of operators, but {name} trains one network; "
            "name one operator for each block, or set [method] type = 'fedoras'"
        )
    if not roles.training.draws_paths:
        return
    if not choices:
        yield (
            f"{name} searches among operators, but the model offers no choice of them; set a family with operators, "
            "such as model.preset = 'cnn_l'"
        )
    objective = training.objective
    if objective.proximal or objective.distillation != "none" or objective.class_mask:
        yield (
            f"{name} trains a path for each batch by its loss alone; leave the objective's proximal, distillation "
            "and class_mask out"
        )
    if techniques.robust_aggregation is not None:
        yield (
            f"robust_aggregation is {techniques.robust_aggregation.TYPE!r}, but {name} aggregates each "
            "operator by the examples that went through it, and keeps what too few clients drew; leave "
            "robust_aggregation out"
        )
    if techniques.teaches:
        yield (
            f"the whole model teaches its submodels in distillation, but that of {name} is a supernet, which cannot "
            "predict; set distillation.iterations = 0"
        )
    if techniques.norms == "calibrated":
        yield (
            f"norms are 'calibrated', but {name} is a supernet, and devices measure the norms of a whole "
            "network only; set 'averaged' or 'recalibrated'"
        )
    search = roles.networks.path_search
    if search is not None and search.federated is not None and model.norm == "batch":
        yield (
            "devices are to score paths, but a supernet's running statistics fit no single path, and only the server "
            "measures them for each path; set model.norm = 'group', or method.search.scoring = 'server'"
        )
    if search is not None and search.federated is None and not validated:
        yield (
            f"{name} scores paths on validation samples, but data.validation_samples is 0; set it, or have devices "
            "score: method.search.scoring = 'devices'"
        )


def _check_growth(method: Method, model: Family) -> Iterator[str]:
    if not method.roles().networks.grows:
        return
    if isinstance(model, Recorded):
        if model.hindrance:
            yield (
                f"method {method.TYPE!r} makes blocks of the network wider and repeats them, but the network "
                f"{model.hindrance}; choose another network, or another method"
            )
    elif isinstance(model, Supernet):
        yield (
            f"method {method.TYPE!r} makes cells of the network wider and deeper, but a network of family "
            f"{model.TYPE!r} has none; set another family, or another method"
        )


def _check_training(method: Method, training: TrainingSettings, model: Family) -> Iterator[str]:
    if training.objective.distillation == "self":
        yield (
            "objective.distillation is 'self', but only a method with a nested submodel to teach sets it; leave it "
            "out, or take [method] type = 'fjord'"
        )
    try:
        actual = method.roles().training.for_round(training, 1)
    except ValueError as error:
        yield f"method {method.TYPE!r} does not work with this training: {error}"
        return
    if actual.objective.distillation == "self" and model.norm == "batch":
        yield (
            f"method {method.TYPE!r} trains a nested width on the weights of the larger one, but norms of "
            "kind 'batch' keep running statistics that two widths cannot share; set model.norm = 'group', or "
            "method.self_distillation = false"
        )


def _check_distillation(method: Method, techniques: Techniques) -> Iterator[str]:
    own = method.roles()
    roles = own.with_techniques(techniques)
    if not roles.techniques.teaches or roles.aggregator.sharing_groups is share_everything:
        return
    cause, remedy = f"method {method.TYPE!r} keeps separate tensors for clients or sizes", ""
    if own.aggregator.sharing_groups is share_everything:
        cause, remedy = "norms = 'bank' keeps separate norms for each size", ", or norms = 'averaged'"
    yield (
        f"in-place distillation teaches submodels of one model that all share, but {cause}; set "
        f"distillation.iterations = 0{remedy}"
    )


def _check_personalised(method: Method, techniques: Techniques) -> Iterator[str]:
    aggregator = method.roles().aggregator
    if not aggregator.personal or aggregator.sharing_groups is share_everything:  # a network's clients share it
        return
    robust, optimiser = techniques.robust_aggregation, techniques.server_optimiser
    if optimiser is not None:
        yield (
            f"server_optimiser is {optimiser.TYPE!r}, which steps one model that all share, but with method "
            f"{method.TYPE!r} each client has its own; leave server_optimiser out"
        )
    if isinstance(robust, CoordinateMedian | TrimmedMean) and robust.otherwise == "stay":
        yield (
            f"robust_aggregation.otherwise is 'stay', but with method {method.TYPE!r} each client has tensors "
            "of its own, which would never learn; set robust_aggregation.otherwise = 'mean'"
        )
