"""What a run goes by from its start to its end, and the networks that it has on the way."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Family, Network
from subfleet.elastic.update_form import update_bytes
from subfleet.methods.aggregator import by_samples
from subfleet.methods.local_training import Trainee, without_self_distillation
from subfleet.methods.roles import Roles
from subfleet.methods.techniques import calibration_training
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
"""What may differ between clients that run the same program."""
_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One network of a run, with all that follows from its settings.

    Attributes:
        candidates: the method's space with its costs, from smallest to largest; memory is estimated from shapes.
        estimate: the cost of any submodel, told in the same way. Where the method goes by `planned_estimates`, sizes
            are chosen by those in the state, see `estimation`.
        members: of a union of networks that clients bring, the size that each of these is of it.
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
    """What does not change during a run.

    Attributes:
        run_id: the configured name and a part that no other run has: devices remember what they did for a run.
        roles: of the configured method, with what the configuration says in their place.
        first: the network that the run begins with.
        evaluation_inputs: what the inputs of the evaluation data are like; None where nobody has looked.
        declare: of another network the id, the settings and the members to all that follows; said before, it takes no
            time.
    """

    config: Run
    run_id: str
    roles: Roles
    first: Declared
    declare: Callable[[str, Family, tuple[Family, ...]], Declared]
    evaluation_inputs: InputStatistics | None = None

    @property
    def network(self) -> Network:
        """The declaration of the network that the run begins with."""
        return self.first.network

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Its sizes with their costs, from smallest to largest."""
        return self.first.candidates

    @property
    def estimate(self) -> Estimates:
        """What its submodels cost."""
        return self.first.estimate

    @property
    def space(self) -> tuple[Architecture, ...]:
        """Its sizes, from smallest to largest."""
        return self.first.space

    def declared(self, lineage: Lineage | None) -> Declared:
        """The network of a lineage; without one, that which the run begins with."""
        if lineage is None or not lineage.id:
            return self.first
        return self.declare(lineage.id, lineage.config, lineage.members)

    @property
    def log_quantile(self) -> float | None:
        """What devices are asked to tell of the logs that they replay; None asks for nothing."""
        return self.config.log_quantile if self.roles.assigner.lasting and self.config.clock is not None else None

    @property
    def sample_bytes(self) -> int:
        """What a sample takes on a device once it is transformed; 0 where it has the size that it was read with."""
        transform = self.config.data.transform
        fixed = transform is not None and transform.fixes_size
        return _VALUE_BYTES * math.prod(self.config.model.input_shape) if fixed else 0

    def training(self, round_number: int, *, student: Architecture | None = None) -> TrainingSettings:
        """The local training of a round, or how norms are measured in it.

        Args:
            round_number: of the round.
            student: the nested submodel of self-distillation; without one there is none.
        """
        settings = self.roles.training.for_round(self.config.training_of(round_number), round_number)
        settings = without_self_distillation(settings) if student is None else settings
        return calibration_training(settings) if self.config.calibrates(round_number) else settings

    def local_training(
        self, round_number: int, trainee: Trainee, *, student: Architecture | None = None
    ) -> TrainingSettings:
        """The local training of one client in a round; the program is that of all who have its size."""
        general = self.training(round_number, student=student)
        if self.config.calibrates(round_number):
            return general
        own = self.roles.training.for_client(general, trainee)
        numbers = {name: getattr(own, name) for name in _LOCAL}
        return replace(general, **numbers)

    def weigh(self, round_number: int) -> Callable[[Update], float]:
        """How much an update of a round counts by itself: measured norms are those of all samples."""
        return by_samples if self.config.calibrates(round_number) else self.roles.aggregator.weigh

    def update_codec(self, network: Network, size: Architecture, budget: Budget) -> AnyUpdateCodec:
        """How a client with this budget writes the update of its size, which is one of the network."""
        return self.roles.training.fit_codec(self.roles.techniques.codec, partial(update_bytes, network, size), budget)
