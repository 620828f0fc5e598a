"""What of a run's configuration does not go with its method: said when the configuration is read. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from subfleet.elastic.network import Family, Supernet
from subfleet.elastic.robust_aggregation import CoordinateMedian, TrimmedMean
from subfleet.methods.aggregator import shared_by_all
from subfleet.methods.roles import Method
from subfleet.methods.techniques import Techniques
from subfleet.protocol.training import TrainingSettings

__all__ = ["Combination"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A method and what else a configuration says of training and aggregation; see `subfleet.settings.run.Run`.

    What needs one model for all is refused where there is none, as it would do nothing or move what no client sees.

    Attributes:
        validated: whether the run keeps validation samples apart.
    """

    method: Method
    training: TrainingSettings
    model: Family
    techniques: Techniques
    validated: bool = True

    def problem(self) -> str:
        """The first thing that does not go together, with a remedy; empty where all does."""
        return next(self._problems(), "")

    def _problems(self) -> Iterator[str]:
        yield from self._of_paths()
        yield from self._of_training()
        yield from self._of_copies()
        yield from self._of_personal_models()

    def _of_paths(self) -> Iterator[str]:
        roles, choices = self.method.roles(), isinstance(self.model, Supernet) and self.model.open_choices
        if choices and not roles.training.draws_paths:
            yield (
                f"model.operators leaves {choices} blocks with a choice of operators, but method {self.method.TYPE!r} "
                "trains one network; name one operator for each block, or take [method] type = 'fedoras'"
            )
        if not roles.training.draws_paths:
            return
        if not choices:
            yield (
                f"method {self.method.TYPE!r} searches among operators, but the model has no choice of them; take a "
                "family with operators, such as model.preset = 'cnn_l'"
            )
        objective = self.training.objective
        if objective.proximal or objective.distillation != "none" or objective.class_mask:
            yield (
                f"method {self.method.TYPE!r} trains a path for each batch by its loss alone; leave the objective's "
                "proximal, distillation and class_mask out"
            )
        robust = self.techniques.robust_aggregation
        if robust is not None:
            yield (
                f"robust_aggregation is {robust.TYPE!r}, but method {self.method.TYPE!r} aggregates each operator by "
                "the examples that went through it, and keeps what too few clients drew; leave robust_aggregation out"
            )
        if self.techniques.teaches:
            yield (
                f"distillation teaches submodels by the whole model, but that of method {self.method.TYPE!r} is a "
                "supernet, which predicts nothing; set distillation.iterations = 0"
            )
        if self.techniques.norms == "calibrated":
            yield (
                f"norms are 'calibrated', but method {self.method.TYPE!r} has no one network whose norms devices could "
                "measure; take 'averaged' or 'recalibrated'"
            )
        search = roles.networks.path_search
        if search is not None and search.federated is not None and self.model.norm == "batch":
            yield (
                "devices are to score paths, but running statistics of a supernet are those of no path, and the server "
                "alone measures them anew for each; take model.norm = 'group', or method.search.scoring = 'server'"
            )
        if search is not None and search.federated is None and not self.validated:
            yield (
                f"method {self.method.TYPE!r} scores paths on validation samples, but data.validation_samples is 0; "
                "set it, or have devices score: method.search.scoring = 'devices'"
            )

    def _of_training(self) -> Iterator[str]:
        if self.training.objective.distillation == "self":
            yield (
                "objective.distillation is 'self', but a method with a nested submodel to teach asks for it itself; "
                "leave it out, or take [method] type = 'fjord'"
            )
        try:
            training = self.method.roles().training.for_round(self.training, 1)
        except ValueError as error:
            yield f"method {self.method.TYPE!r} does not go with this training: {error}"
            return
        if training.objective.distillation == "self" and self.model.norm == "batch":
            yield (
                f"method {self.method.TYPE!r} trains a nested width on the weights of the larger one, but norms of "
                "kind 'batch' keep running statistics that two widths cannot share; set model.norm = 'group', or "
                "method.self_distillation = false"
            )

    def _of_copies(self) -> Iterator[str]:
        own = self.method.roles()
        roles = own.with_techniques(self.techniques)
        if not roles.techniques.teaches:
            return
        if roles.aggregator.sharing_groups is not shared_by_all:
            apart, remedy = f"method {self.method.TYPE!r} keeps tensors of its own for clients or sizes", ""
            if own.aggregator.sharing_groups is shared_by_all:
                apart, remedy = "norms = 'bank' keeps norms of its own for each size", ", or norms = 'averaged'"
            yield (
                f"in-place distillation teaches submodels of one model that all share, but {apart}; set "
                f"distillation.iterations = 0{remedy}"
            )

    def _of_personal_models(self) -> Iterator[str]:
        aggregator = self.method.roles().aggregator
        if not aggregator.personal or aggregator.sharing_groups is shared_by_all:  # the clients of a network share it
            return
        robust, optimiser = self.techniques.robust_aggregation, self.techniques.server_optimiser
        if optimiser is not None:
            yield (
                f"server_optimiser is {optimiser.TYPE!r}, which steps one model that all share, but with "
                f"method {self.method.TYPE!r} each client has its own; leave server_optimiser out"
            )
        if isinstance(robust, CoordinateMedian | TrimmedMean) and robust.otherwise == "stay":
            yield (
                f"robust_aggregation.otherwise is 'stay', but with method {self.method.TYPE!r} each client has tensors "
                "of its own, which would never learn; set robust_aggregation.otherwise = 'mean'"
            )
