"""A run: one frozen description of everything, the same for real devices and for emulated ones, checked as a whole."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.robust_aggregation import AnyRobustAggregation
from subfleet.elastic.server_optimisers import AnyServerOptimiser
from subfleet.elastic.teaching import DistillationSettings
from subfleet.methods import AnyMethod
from subfleet.methods.describing import Setting
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.roles import Roles
from subfleet.methods.techniques import NormPolicy, Techniques
from subfleet.protocol.bounds import Length, Range, checked
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.identifiers import ClientId
from subfleet.protocol.limits import Count, Positive, PositiveAmount, PositiveFraction
from subfleet.protocol.schema import ADDED_LATER, canonical_json
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec
from subfleet.settings.first_model import FirstWeights, ModelOf
from subfleet.settings.fleet import DeviceSettings, FleetSettings, HostSettings, MemoryLimits
from subfleet.settings.outliers import OutlierSettings
from subfleet.settings.parts import NO_PART, parts_of
from subfleet.settings.rules import RUN_RULES, label_shape_of
from subfleet.settings.samples import DataSettings
from subfleet.settings.timing import Deadlines, Evaluations, LogClock

__all__ = ["Run"]

Limit = Annotated[float, Range(least=0, words="0 for no limit, or above 0")]

RUNTIME_OVERHEAD_BYTES: Mapping[str, int] = MappingProxyType(
    {"onnx": 1_800_000, "executorch": 2_700_000, "torch": 5_900_000}
)
"""Smallest difference between planned peak and estimate over the submodels of the quickstart: the estimate stays below
the plan, so that no submodel that fits is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(*RUN_RULES)
class Run:
    """Everything about a run; where it lives and listens is said on the command line.

    Attributes:
        name: of the run; a server that starts again with the same name and state folder takes the run up.
        data: what the whole model is evaluated on after every round, and what emulated devices train on.
        fleet: its name, and the devices of an emulated one.
        host: how an emulated fleet is run.
        rounds: how many, 1 or more.
        evaluation: when devices evaluate the model on held-out data of their own.
        min_clients: a round starts when this many clients are there.
        clients_per_round: how many of those that can take part are drawn for each round; 0 takes all of them.
        model: the elastic network that is trained.
        model_of: a network of another run that takes its place; None from when it has done so, see
            `subfleet.settings.taking`.
        first_weights: that the model begins with; None draws them from the seed.
        training: local training in round 1; its seed is replaced by `seed`.
        learning_rate_decay: factor on the learning rate from each round to the next, above 0 and at most 1.
        method: which federated method, with its parameters.
        robust_aggregation: the rule in place of the weighted mean of the updates; None takes the mean.
        server_optimiser: takes the mean change of a round for a gradient; None leaves it to the method.
        update_codec: how devices write their updates; None leaves it to the method.
        distillation: what the full model teaches its submodels after each round, on noise; None leaves it to the
            method.
        norms: "averaged", "bank", "recalibrated" or "calibrated", see `subfleet.methods.techniques`; "recalibrated"
            measures running statistics on the inputs of the evaluation data, without their labels.
        calibrate_every: with norms "calibrated", after how many rounds devices measure running statistics in a round of
            its own; after the last one they always do, and with 0 only then.
        rates: width rates of the search space, each above 0 and at most 1.
        seed: of initial weights and data order.
        max_client_fraction: the largest fraction of the weights of a round's updates that one client may have, above 0
            and at most 1; see `subfleet.rounds.weights.find_fraction_limit`. With 1 every update counts what the method
            gives it; None is three times an equal fraction, and half at most.
        outliers: when an update or an aggregated round is suspect, and what follows; see there.
        quorum: fraction of the given tasks that must be answered to close a round; below 1 a round does not wait for
            the slowest, and its outcome depends on timing. Who has not answered its last two tasks is not counted, see
            `subfleet.rounds.live`.
        communication_s: seconds of its link that a device gives to a round, each way.
        log_quantile: where a client keeps one size, and replays a log, the fraction of the log's time in which it may
            have less memory, or less of a link, than that size takes; at least 0 and below 1.
        training_s: seconds that a device gives to training in a round; 0 is no limit. It limits those devices that tell
            what they compute in a second.
        batch_s: seconds that such a device gives to one batch, however many it has; 0 is no limit.
        clock: a logical clock for replayed logs; None reads everything live.
        deadlines: see there.
        max_attempts: tasks that one client may be given in one round, each smaller than the last.
        exports_per_round: programs that are written ahead in each round, for sizes that a search would rather give.
        programs_from: by the key of a program, such as "onnx/0123456789abcdef", the turn from which it counts in what
            devices are given, or 0 for never, as another run's summary.json has it: so its rounds are played again,
            whatever time programs take. A turn is a try of a round, counted over the run. Empty: the turn after that in
            which it was written.
        targets: program targets that are exported for training, where a device runs several its own order decides.
        deploy_targets: formats of each device's own model after the last round; empty deploys nothing.
        deploy_quantisation: "dynamic" or "static" deploys these models in 8-bit integers, with ranges from the first
            evaluation samples, and tells their accuracy beside that of float32.
        memory_overhead_bytes: by target, what its runtime needs beyond the estimate of a submodel's training memory. It
            only saves exports: the exported program's own plan decides whether a submodel fits.
        memory_limits: memory that devices may give to training at most, beside their own share and limit.
        keep_rounds: rounds whose checkpoints and updates stay on disk.
        observers: names of those that hear of the run besides the screen, such as "tensorboard".
        device: where the server computes. Aggregation has the same bits on both; distillation, server optimisers,
            measured statistics and evaluation have not, so that a run ends where it was begun. Clients compute where
            they do.
    """

    name: ClientId
    model: AnyFamily
    data: DataSettings
    fleet: FleetSettings = field(default_factory=FleetSettings)
    host: HostSettings = field(default_factory=HostSettings, metadata=NO_PART)
    rounds: Positive = 5
    evaluation: Evaluations = field(default_factory=Evaluations)
    min_clients: Positive = field(default=2, metadata=NO_PART)
    clients_per_round: Annotated[int, Range(least=0, words="0 for all, or above 0")] = 0
    training: TrainingSettings = field(default_factory=TrainingSettings)
    learning_rate_decay: PositiveFraction = 1.0
    method: AnyMethod = field(default_factory=HeteroFL)
    robust_aggregation: AnyRobustAggregation | None = None
    server_optimiser: AnyServerOptimiser | None = None
    update_codec: AnyUpdateCodec | None = None
    distillation: DistillationSettings | None = None
    norms: NormPolicy = "averaged"
    calibrate_every: Count = 0
    rates: Annotated[tuple[PositiveFraction, ...], Length(least=1)] = (0.25, 0.5, 0.75, 1.0)
    seed: int = 0
    max_client_fraction: PositiveFraction | None = None
    outliers: OutlierSettings = field(default_factory=OutlierSettings)
    quorum: PositiveFraction = 1.0
    communication_s: PositiveAmount = 10.0
    log_quantile: Annotated[float, Range(least=0, below=1)] = 0.1
    training_s: Limit = 0.0
    batch_s: Limit = 0.0
    clock: LogClock | None = None
    deadlines: Deadlines = field(default_factory=Deadlines, metadata=NO_PART)
    max_attempts: Positive = 3
    exports_per_round: Positive = 4
    programs_from: dict[str, Annotated[int, Range(least=0, words="a turn, or 0 for never")]] = field(
        default_factory=dict
    )
    targets: Annotated[tuple[str, ...], Length(least=1)] = ("onnx", "executorch")
    deploy_targets: tuple[str, ...] = ("onnx", "executorch")
    deploy_quantisation: Literal["none", "dynamic", "static"] = "none"
    memory_overhead_bytes: dict[str, int] = field(default_factory=lambda: dict(RUNTIME_OVERHEAD_BYTES))
    memory_limits: MemoryLimits = field(default_factory=MemoryLimits)
    keep_rounds: Positive = field(default=2, metadata=NO_PART)
    observers: tuple[str, ...] = field(default=(), metadata=NO_PART)
    device: Literal["cpu", "cuda"] = "cpu"
    model_of: ModelOf | None = field(default=None, metadata=NO_PART)
    first_weights: FirstWeights | None = field(default=None, metadata=ADDED_LATER)

    def emulated_devices(self) -> tuple[DeviceSettings, ...]:
        """The devices of an emulated fleet, one by one.

        Raises:
            ConfigError: there are none.
        """
        if not self.fleet.devices:
            raise ConfigError(
                f"the run {self.name!r} has no devices to emulate; add tables [[fleet.devices]], or serve it"
            )
        return self.fleet.each()

    @property
    def label_shape(self) -> tuple[int, ...] | None:
        """Of one sample's label; None where the model's family does not say what it has outputs for."""
        return label_shape_of(self.training, self.model)

    @property
    def setting(self) -> Setting:
        """What decides, beside the method's parameters, whether it does what its paper says."""
        return Setting(
            norm=self.model.norm,
            learnable_steps=self.model.learnable_steps,
            scaler=self.model.scaler,
            techniques=self.techniques,
        )

    @property
    def techniques(self) -> Techniques:
        """What this configuration says in place of its method."""
        return Techniques(**{one.name: getattr(self, one.name) for one in fields(Techniques)})

    @property
    def roles(self) -> Roles:
        """The method's roles, with these techniques."""
        return self.method.roles().with_techniques(self.techniques)

    @property
    def strict(self) -> bool:
        """Whether a round waits for every client that it knows, so that timing takes no part in the outcome.

        A client that lets a deadline pass is another matter: it is waited for shortly the next time, and then not at
        all.
        """
        return self.quorum >= 1

    @property
    def total_rounds(self) -> int:
        """The rounds of training, and those in which norms are measured."""
        if self.norms != "calibrated":
            return self.rounds
        return self.rounds + (math.ceil(self.rounds / self.calibrate_every) if self.calibrate_every else 1)

    def calibrates(self, round_number: int) -> bool:
        """Whether norms are measured in a round, and nothing is trained."""
        if self.norms != "calibrated":
            return False
        in_turn = self.calibrate_every and round_number % (self.calibrate_every + 1) == 0
        return bool(in_turn) or round_number == self.total_rounds

    def training_of(self, round_number: int) -> TrainingSettings:
        """The local training of a round: the schedule follows the rounds, as in every reference implementation."""
        measured = sum(self.calibrates(before) for before in range(1, round_number)) if self.calibrate_every else 0
        rate = self.training.learning_rate * self.learning_rate_decay ** (round_number - 1 - measured)
        return replace(self.training, learning_rate=rate, seed=self.seed)

    def log_time_s(self, turn: int) -> float | None:
        """Where replayed logs are read in a turn, which is a try of a round, counted from 1; None for a live run."""
        return None if self.clock is None else self.clock.start_s + (turn - 1) * self.clock.step_s

    def fingerprint(self) -> str:
        """Everything that takes part in the outcome, as canonical JSON: a run is only taken up with the same.

        Raises:
            ConfigError: the run waits for the model of another one; see `subfleet.settings.taking.with_model`.
        """
        if self.model_of is not None:
            raise ConfigError(
                f"run {self.name!r} takes its model from run {self.model_of.run!r}, which it has not done yet; begin "
                "it with `subfleet run`, or take the model before it is begun"
            )
        return canonical_json(parts_of(self)).decode()
