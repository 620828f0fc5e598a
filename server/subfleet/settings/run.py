"""The settings of a run, for real and emulated devices alike, checked as a whole."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.robust_aggregation import AnyRobustAggregation
from subfleet.elastic.server_optimisers import AnyServerOptimiser
from subfleet.elastic.technique_settings import DistillationSettings
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
from subfleet.settings.fingerprint import CHANGEABLE, select_outcome_settings
from subfleet.settings.fleet import DeviceSettings, FleetSettings, HostSettings, MemoryLimits
from subfleet.settings.rules import RUN_RULES, find_label_shape
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import (
    AsynchronousSettings,
    Deadlines,
    Evaluations,
    FirstWeights,
    LogClock,
    ModelOf,
    OutlierSettings,
)

__all__ = ["Run"]

Limit = Annotated[float, Range(least=0, words="0 for no limit, or above 0")]

RUNTIME_OVERHEAD_BYTES: Mapping[str, int] = MappingProxyType(
    {"onnx": 1_800_000, "executorch": 940_000, "torch": 5_900_000}
)
"""Smallest difference between planned peak and estimate over the submodels of the quickstart: with it,
estimates stay below plans, and no submodel that fits is missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(*RUN_RULES)
class Run:
    """All settings of a run, except for places and addresses, which the command line has.

    Attributes:
        name: of the run. A server that is started again with the same name and state folder resumes the run.
        data: the evaluation data of the server, and the training data of emulated devices.
        fleet: name of the fleet, and the devices of an emulated one.
        host: how an emulated fleet is run.
        rounds: number of training rounds.
        evaluation: when devices evaluate the model on held-out data of their own.
        min_clients: a round starts when this many clients are present.
        clients_per_round: number of available clients drawn for each round; 0 takes all.
        model: the elastic network that is trained.
        model_of: a network of another run that replaces `model`; None once it has, see
            `subfleet.settings.stored_networks`.
        first_weights: initial weights; None draws them from the seed.
        networks: by name, networks that devices may declare as their own.
        training: local training in round 1; its seed is replaced by `seed`.
        learning_rate_decay: factor on the learning rate from each round to the next, above 0 and at most 1.
        method: the federated method with its parameters.
        robust_aggregation: the rule used instead of the weighted mean; None takes the mean.
        server_optimiser: treats the mean change of a round as a gradient; None leaves it to the method.
        update_codec: how devices encode their updates; None leaves it to the method.
        distillation: distillation of the full model into its submodels after each round, on noise; None leaves it to
            the method.
        norms: "averaged", "bank", "recalibrated" or "calibrated", see `subfleet.methods.techniques`; "recalibrated"
            measures running statistics on the inputs of the evaluation data, without labels.
        calibrate_every: with norms "calibrated", devices measure running statistics in a round of its own after this
            many rounds, and after the last one; 0 measures them only after the last one.
        rates: width rates of the search space, each above 0 and at most 1.
        seed: of initial weights and data order.
        max_client_fraction: largest fraction of the total weight of a round that one client may have, above 0 and at
            most 1; None is three equal shares, and at most a half. See `subfleet.rounds.weights.find_fraction_limit`.
        outliers: outlier detection and diverged rounds.
        quorum: fraction of the tasks that must be answered to close a round. Below 1 a round does not wait for the
            slowest devices, and its result depends on timing. Devices that did not answer their last two tasks are not
            counted, see `subfleet.rounds.live`.
        asynchronous: rounds in which no device waits for another; None has rounds that begin and end together.
        communication_s: seconds that a device spends on transfers in a round, in each direction.
        log_quantile: if a method keeps the submodel of a client for the whole run, and the client replays a log: the
            fraction of the log's time in which memory or a link may be below what the submodel needs.
        training_s: seconds that a device spends on training in a round; 0 for no limit. It applies to devices that
            report their speed.
        batch_s: seconds that such a device spends on one batch; 0 for no limit.
        clock: a logical clock for replayed logs; None uses live readings.
        deadlines: time limits.
        max_attempts: tasks that a client may get in one round, each smaller than the one before.
        exports_per_round: programs written ahead in each round for submodels that a search would have preferred.
        programs_from: by program key, such as "onnx/0123456789abcdef", the attempt from which the program is used, or 0
            for never; taken from `summary.json` of another run, it repeats that run independently of export times.
            Attempts are counted over the whole run. Empty: programs are used from the attempt after their export.
        targets: program targets that are exported for training; a device that supports several chooses.
        deploy_targets: formats of the models that devices receive after the last round; empty deploys nothing.
        deploy_quantisation: "dynamic" or "static" deploys 8-bit models with ranges from the first evaluation samples,
            and reports their accuracy beside that of float32.
        memory_overhead_bytes: by target, memory that its runtime needs beyond the estimate for a submodel. It only
            avoids exports: the plan of the exported program decides whether a submodel fits.
        memory_limits: upper limits of devices' memory budgets, beside the devices' own.
        keep_rounds: number of rounds for which checkpoints and updates stay on disk.
        observers: names of additional observers of the run, such as "tensorboard".
        device: compute device of the server. Aggregation gives the same bits on both; distillation, server optimisers,
            measured statistics and evaluation do not, so a run must end on the device on which it began.
    """

    name: ClientId
    model: AnyFamily
    data: DataSettings
    fleet: FleetSettings = field(default_factory=FleetSettings)
    host: HostSettings = field(default_factory=HostSettings, metadata=CHANGEABLE)
    rounds: Positive = 5
    evaluation: Evaluations = field(default_factory=Evaluations)
    min_clients: Positive = field(default=2, metadata=CHANGEABLE)
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
    deadlines: Deadlines = field(default_factory=Deadlines, metadata=CHANGEABLE)
    max_attempts: Positive = 3
    exports_per_round: Positive = 4
    programs_from: dict[str, Annotated[int, Range(least=0, words="an attempt, or 0 for never")]] = field(
        default_factory=dict
    )
    targets: Annotated[tuple[str, ...], Length(least=1)] = ("onnx", "executorch")
    deploy_targets: tuple[str, ...] = ("onnx", "executorch")
    deploy_quantisation: Literal["none", "dynamic", "static"] = "none"
    memory_overhead_bytes: dict[str, int] = field(default_factory=lambda: dict(RUNTIME_OVERHEAD_BYTES))
    memory_limits: MemoryLimits = field(default_factory=MemoryLimits)
    keep_rounds: Positive = field(default=2, metadata=CHANGEABLE)
    observers: tuple[str, ...] = field(default=(), metadata=CHANGEABLE)
    device: Literal["cpu", "cuda"] = "cpu"
    model_of: ModelOf | None = field(default=None, metadata=CHANGEABLE)
    first_weights: FirstWeights | None = field(default=None, metadata=ADDED_LATER)
    networks: dict[str, AnyFamily] = field(default_factory=dict, metadata=ADDED_LATER)
    asynchronous: AsynchronousSettings | None = field(default=None, metadata=ADDED_LATER)

    def emulated_devices(self) -> tuple[DeviceSettings, ...]:
        """The devices of an emulated fleet, with repeated devices expanded.

        Raises:
            ConfigError: there are none.
        """
        if not self.fleet.devices:
            raise ConfigError(
                f"the run {self.name!r} has no devices to emulate; add tables [[fleet.devices]], or serve it"
            )
        return self.fleet.expand_devices()

    @property
    def label_shape(self) -> tuple[int, ...] | None:
        """The shape of one label; None if the network family does not determine it."""
        return find_label_shape(self.training, self.model)

    @property
    def setting(self) -> Setting:
        """What determines, beside the parameters of the method, how far the run departs from the method's paper."""
        return Setting(
            norm=self.model.norm,
            learnable_steps=self.model.learnable_steps,
            scaler=self.model.scaler,
            asynchronous=self.asynchronous is not None,
            techniques=self.techniques,
        )

    @property
    def techniques(self) -> Techniques:
        """The techniques that replace those of the method."""
        return Techniques(**{field.name: getattr(self, field.name) for field in fields(Techniques)})

    @property
    def roles(self) -> Roles:
        """The roles of the method, with these techniques."""
        return self.method.roles().with_techniques(self.techniques)

    @property
    def strict(self) -> bool:
        """Whether a round waits for all its clients, so that the result does not depend on timing.

        A client that misses a deadline is waited for shortly the next time, and then no longer.
        """
        return self.quorum >= 1

    @property
    def total_rounds(self) -> int:
        """The number of training rounds and of rounds that measure norms."""
        if self.norms != "calibrated":
            return self.rounds
        return self.rounds + (math.ceil(self.rounds / self.calibrate_every) if self.calibrate_every else 1)

    def calibrates(self, round_number: int) -> bool:
        """Whether a round measures norms instead of training."""
        if self.norms != "calibrated":
            return False
        in_turn = self.calibrate_every and round_number % (self.calibrate_every + 1) == 0
        return bool(in_turn) or round_number == self.total_rounds

    def compute_training(self, round_number: int) -> TrainingSettings:
        """The local training of a round; the learning rate decays with the training rounds."""
        measured = sum(self.calibrates(before) for before in range(1, round_number)) if self.calibrate_every else 0
        rate = self.training.learning_rate * self.learning_rate_decay ** (round_number - 1 - measured)
        return replace(self.training, learning_rate=rate, seed=self.seed)

    def log_time_s(self, run_attempt: int) -> float | None:
        """The time of replayed logs in an attempt, counted from 1; None for live readings."""
        return None if self.clock is None else self.clock.start_s + (run_attempt - 1) * self.clock.step_s

    def fingerprint(self) -> str:
        """All settings that determine the outcome, as canonical JSON; a run is only resumed with the same.

        Raises:
            ConfigError: the model of another run has not been taken yet; see `stored_networks.resolve_model`.
        """
        if self.model_of is not None:
            raise ConfigError(
                f"run {self.name!r} takes its model from run {self.model_of.run!r}, but has not read it yet; begin "
                "it with `subfleet run`, or read the model first"
            )
        return canonical_json(select_outcome_settings(self)).decode()
