"""The run context: everything that stays the same during a run, and the networks that appear on the way."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Family, Network
from subfleet.elastic.update_form import update_bytes
from subfleet.methods.aggregator import count_samples
from subfleet.methods.roles import Roles, Trainee, change_objective
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.messages import Update
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec
from subfleet.search.candidates import Candidate
from subfleet.search.estimates import Estimates
from subfleet.settings.run import Run

_LOCAL = ("epochs", "local_steps", "learning_rate", "proximal_mu", "distillation_weight")
"""Settings that may differ between clients with the same program."""
_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One network of a run, with everything that follows from its settings.

    Attributes:
        candidates: the method's space with estimated costs, from smallest to largest; memory is estimated from shapes.
        estimate: estimates the cost of any submodel in the same way. If the method uses `planned_estimates`, sizes are
            chosen by the estimates in the state instead, see `networks`.
        members: of a union of networks that clients bring, the size that each of them is in it.
    """

    network: Network
    candidates: tuple[Candidate, ...]
    estimate: Estimates
    members: Mapping[Family, Architecture] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def space(self) -> tuple[Architecture, ...]:
        """The sizes that may be assigned, from smallest to largest."""
        return tuple(candidate.architecture for candidate in self.candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything that stays the same during a run.

    Attributes:
        run_id: the configured name with a unique suffix: devices remember their work by it.
        roles: the roles of the configured method, with the configuration's overrides.
        first: the run's first network.
        evaluation_inputs: statistics of the inputs of the evaluation data; None if unknown.
        declare: declares another network from its id, settings and members; results are cached.
    """

    config: Run
    run_id: str
    roles: Roles
    first: Declared
    declare: Callable[[str, Family, tuple[Family, ...]], Declared]
    evaluation_inputs: InputStatistics | None = None

    @property
    def network(self) -> Network:
        """The declaration of the first network."""
        return self.first.network

    @property
    def space(self) -> tuple[Architecture, ...]:
        """The sizes of the first network, from smallest to largest."""
        return self.first.space

    def get_declared(self, lineage: Lineage | None) -> Declared:
        """The network of a lineage; without one, the first network."""
        if lineage is None or not lineage.id:
            return self.first
        return self.declare(lineage.id, lineage.config, lineage.members)

    @property
    def log_quantile(self) -> float | None:
        """The quantile of replayed logs that devices report; None reports nothing."""
        return self.config.log_quantile if self.roles.assigner.lasting and self.config.clock is not None else None

    @property
    def sample_bytes(self) -> int:
        """Bytes of a transformed sample on a device; 0 if samples keep their original size."""
        transform = self.config.data.transform
        fixed = transform is not None and transform.fixes_size
        return _VALUE_BYTES * math.prod(self.config.model.input_shape) if fixed else 0

    def training(self, round_number: int, *, student: Architecture | None = None) -> TrainingSettings:
        """The settings of local training in a round, or of its calibration.

        Args:
            round_number: number of the round.
            student: the nested submodel of self-distillation; None trains without.
        """
        settings = self.roles.training.for_round(self.config.compute_training(round_number), round_number)
        if student is None and settings.objective.distillation == "self":
            settings = change_objective(settings, {"distillation_weight": 0.0}, distillation="none")
        if self.config.calibrates(round_number):  # one pass at learning rate 0 measures the norms
            return replace(settings, epochs=1, local_steps=0, learning_rate=0.0)
        return settings

    def local_training(
        self, round_number: int, trainee: Trainee, *, student: Architecture | None = None
    ) -> TrainingSettings:
        """The local training of one client in a round; all clients with the same size share its program."""
        general = self.training(round_number, student=student)
        if self.config.calibrates(round_number):
            return general
        own = self.roles.training.for_client(general, trainee)
        numbers = {name: getattr(own, name) for name in _LOCAL}
        return replace(general, **numbers)

    def weigh(self, round_number: int) -> Callable[[Update], float]:
        """The weight of an update by the method; in a calibration, the number of its samples."""
        return count_samples if self.config.calibrates(round_number) else self.roles.aggregator.weigh

    def update_codec(self, network: Network, size: Architecture, budget: Budget) -> AnyUpdateCodec:
        """The codec of the update of a client with this budget, for a size of a network."""
        return self.roles.training.fit_codec(self.roles.techniques.codec, partial(update_bytes, network, size), budget)
