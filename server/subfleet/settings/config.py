"""The configuration of a run: one frozen description, read from TOML, checked before anything starts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from subfleet.elastic.merges import AnyStackedMerge
from subfleet.elastic.network import ModelConfig
from subfleet.elastic.server_optimisers import AnyServerOptimiser
from subfleet.elastic.teaching import DistillationSettings
from subfleet.methods import AnyMethod
from subfleet.methods.combining import Combination
from subfleet.methods.describing import Setting
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.norms import NormPolicy
from subfleet.methods.overrides import Overrides
from subfleet.methods.policies import Policies
from subfleet.protocol.class_names import check_class_names
from subfleet.protocol.messages import check_client_id
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.topics import DEFAULT_FLEET, Topics
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec
from subfleet.settings.memory_limits import MemoryLimits
from subfleet.settings.suspicion import SuspicionSettings

__all__ = ["Deadlines", "HttpAddress", "LogClock", "ServerConfig"]

RUNTIME_OVERHEAD_BYTES: Mapping[str, int] = MappingProxyType(
    {"onnx": 1_800_000, "executorch": 3_200_000, "torch": 11_900_000}
)
"""Smallest difference between planned peak and estimate over the subnets of the quickstart: the estimate stays below
the plan, so that no subnet that fits is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogClock:
    """A logical clock: round r reads replayed resource logs at `start_s + (r - 1) * step_s`.

    A try that folds nothing takes a step as well: so much later its round is tried again, and so are all rounds after
    it. A step of 0 reads the same moment for ever.
    """

    start_s: float = 0.0
    step_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long anything may take, in seconds; nothing waits for ever.

    Attributes:
        join_s: for the wanted number of clients to be there, and for one of them to answer a round's announcement.
        measure_s: for the clients' telemetry at the start of a round.
        round_s: from the assignment of tasks to the close of the round.
        deploy_s: for clients to fetch their models after the last round.
        lease_s: a client whose last sign of life is older than this is taken for gone.
        forget_s: a client that never took part and was silent for so long is forgotten.
        linger_s: after the end, for clients to hear of it.
        retry_s: for a round in which nothing was folded, from the end of its first try: so long it is tried again, or,
            under a logical clock, so many seconds of the logs.
        pause_s: before it is tried again for the first time; each further pause is twice as long as the one before.
        longest_pause_s: at most.
    """

    join_s: float = 600.0
    measure_s: float = 30.0
    round_s: float = 600.0
    deploy_s: float = 300.0
    lease_s: float = 30.0
    forget_s: float = 3600.0
    linger_s: float = 5.0
    retry_s: float = 3600.0
    pause_s: float = 1.0
    longest_pause_s: float = 60.0

    def __post_init__(self) -> None:
        above_zero = (
            "join_s",
            "measure_s",
            "round_s",
            "deploy_s",
            "lease_s",
            "forget_s",
            "retry_s",
            "pause_s",
            "longest_pause_s",
        )
        for name in above_zero:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0")
        if self.linger_s < 0:
            raise ValueError(f"linger_s is {self.linger_s}, but must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """Where the HTTP API listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything about a run; where it lives and listens is said on the command line.

    Attributes:
        name: of the run; a server that starts again with the same name and state folder takes the run up.
        fleet: name of the fleet, a part of every topic.
        rounds: how many, 1 or more.
        min_clients: a round starts when this many clients are there.
        clients_per_round: how many of those that can take part are drawn for each round; 0 takes all of them.
        model: the elastic network that is trained.
        evaluation_data: data set on which the whole model is evaluated after every round.
        classes: names of the model's classes in the order of their numbers; devices map their data by them. Empty takes
            those of the evaluation data where these have names; else a class's name is its number.
        training: local training in round 1; its seed is replaced by `seed`.
        learning_rate_decay: factor on the learning rate from each round to the next, above 0 and at most 1.
        method: which federated method, with its parameters.
        merge: a robust merge in place of the weighted mean of the updates; None takes the mean.
        server_optimiser: takes the mean change of a round for a gradient; None leaves it to the method.
        update_codec: how devices write their updates; None leaves it to the method.
        distillation: what the full model teaches its subnets after each round, on noise; None leaves it to the method.
        norms: "averaged", "bank", "recalibrated" or "calibrated", see `subfleet.methods.norms`; "recalibrated"
            measures running statistics on the inputs of the evaluation data, without their labels.
        calibrate_every: with norms "calibrated", after how many rounds devices measure running statistics in a round of
            its own; after the last one they always do, and with 0 only then.
        rates: width rates of the search space, each above 0 and at most 1.
        seed: of initial weights and data order.
        max_client_share: of the weights of a round's updates, that one client's may have at most, above 0 and at most
            1; see `subfleet.rounds.weights.share_limit`. With 1 every update counts what the method gives it.
        suspicion: when an update or a folded round is suspect, and what follows; see there.
        quorum: share of the given tasks that must be answered to close a round; below 1 a round does not wait for the
            slowest, and its outcome depends on timing.
        communication_s: seconds of its link that a device gives to a round, each way.
        log_quantile: where a client keeps one size, and replays a log, the share of the log's time in which it may have
            less memory, or less of a link, than that size takes; at least 0 and below 1.
        training_s: seconds that a device gives to training in a round; 0 is no limit. It limits those devices that tell
            what they compute in a second.
        clock: a logical clock for replayed logs; None reads everything live.
        deadlines: see there.
        max_attempts: tasks that one client may be given in one round, each smaller than the last.
        exports_per_round: programs that are written ahead in each round, for sizes that a search would rather give.
        targets: program targets that are exported for training, where a device runs several its own order decides.
        deploy_targets: formats of each device's own model after the last round; empty deploys nothing.
        deploy_quantisation: "dynamic" or "static" deploys these models in 8-bit integers, with ranges from the first
            evaluation samples, and tells their accuracy beside that of float32.
        memory_overhead_bytes: by target, what its runtime needs beyond the estimate of a subnet's training memory. It
            only saves exports: the exported program's own plan decides whether a subnet fits.
        memory_limits: memory that devices may give to training at most, beside their own share and limit.
        keep_rounds: rounds whose checkpoints and updates stay on disk.
    """

    name: str
    model: ModelConfig
    evaluation_data: str
    classes: tuple[str, ...] = ()
    rounds: int = 5
    min_clients: int = 2
    clients_per_round: int = 0
    fleet: str = DEFAULT_FLEET
    training: TrainingSettings = field(default_factory=TrainingSettings)
    learning_rate_decay: float = 1.0
    method: AnyMethod = field(default_factory=HeteroFL)
    merge: AnyStackedMerge | None = None
    server_optimiser: AnyServerOptimiser | None = None
    update_codec: AnyUpdateCodec | None = None
    distillation: DistillationSettings | None = None
    norms: NormPolicy = "averaged"
    calibrate_every: int = 0
    rates: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    seed: int = 0
    max_client_share: float = 0.5
    suspicion: SuspicionSettings = field(default_factory=SuspicionSettings)
    quorum: float = 1.0
    communication_s: float = 10.0
    log_quantile: float = 0.1
    training_s: float = 0.0
    clock: LogClock | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_attempts: int = 3
    exports_per_round: int = 4
    targets: tuple[str, ...] = ("onnx", "executorch")
    deploy_targets: tuple[str, ...] = ("onnx", "executorch")
    deploy_quantisation: Literal["none", "dynamic", "static"] = "none"
    memory_overhead_bytes: dict[str, int] = field(default_factory=lambda: dict(RUNTIME_OVERHEAD_BYTES))
    memory_limits: MemoryLimits = field(default_factory=MemoryLimits)
    keep_rounds: int = 2

    def __post_init__(self) -> None:
        check_client_id(self.name)
        Topics(self.fleet)
        for name in ("rounds", "min_clients", "max_attempts", "exports_per_round", "keep_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be 1 or more")
        if self.clients_per_round < 0:
            raise ValueError(f"clients_per_round is {self.clients_per_round}, but must be 0 for all, or above 0")
        for name in ("max_client_share", "quorum", "learning_rate_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0 and at most 1")
        if not self.rates or not all(0 < rate <= 1 for rate in self.rates):
            raise ValueError(f"rates are {list(self.rates)}, but must be one or more numbers above 0 and at most 1")
        self._check_budgets()
        self._check_norms()
        self._check_classes()
        if not self.targets:
            raise ValueError("targets are empty, but must name one or more program targets such as 'onnx'")
        self._check_combination()

    def _check_classes(self) -> None:
        check_class_names(self.classes)
        if not self.classes:
            return
        if not self.training.objective.over_classes:
            raise ValueError(
                f"classes are named, but objective {self.training.objective.name!r} knows none; leave them out"
            )
        if len(self.classes) != self.model.class_count:
            raise ValueError(
                f"classes names {len(self.classes)}, but must name all {self.model.class_count} of the model"
            )

    def _check_budgets(self) -> None:
        if self.communication_s <= 0:
            raise ValueError(f"communication_s is {self.communication_s}, but must be above 0")
        if not 0 <= self.log_quantile < 1:
            raise ValueError(f"log_quantile is {self.log_quantile}, but must be at least 0 and below 1")
        if self.training_s < 0:
            raise ValueError(f"training_s is {self.training_s}, but must be 0 for no limit, or above 0")

    def _check_combination(self) -> None:
        said = Combination(
            method=self.method,
            training=self.training,
            model=self.model,
            norms=self.norms,
            merge=self.merge,
            server_optimiser=self.server_optimiser,
            distillation=self.distillation,
        )
        if problem := said.problem():
            raise ValueError(problem)

    def _check_norms(self) -> None:
        if self.calibrate_every < 0 or (self.calibrate_every and self.norms != "calibrated"):
            raise ValueError(
                f"calibrate_every is {self.calibrate_every} and norms are {self.norms!r}, but it must be 0, or above 0 "
                "with norms = 'calibrated'"
            )
        if self.norms == "calibrated" and (self.model.norm != "batch" or self.training.micro_batch_size):
            raise ValueError(
                f"norms are 'calibrated' with model.norm {self.model.norm!r} and micro_batch_size "
                f"{self.training.micro_batch_size}, but devices measure norms of kind 'batch' on whole batches"
            )

    @property
    def setting(self) -> Setting:
        """What decides, beside the method's parameters, whether it does what its paper says."""
        return Setting(
            norm=self.model.norm,
            learnable_steps=self.model.learnable_steps,
            scaler=self.model.scaler,
            norms=self.norms,
            merge=self.merge,
            server_optimiser=self.server_optimiser,
            update_codec=self.update_codec,
            distillation=self.distillation,
        )

    @property
    def policies(self) -> Policies:
        """The steps of a round: the method's, with what this configuration says in their place."""
        overrides = Overrides(
            norms=self.norms,
            merge=self.merge,
            server_optimiser=self.server_optimiser,
            distillation=self.distillation,
            update_codec=self.update_codec,
        )
        return overrides.applied(self.method.policies())

    @property
    def strict(self) -> bool:
        """Whether a round waits for every client that it knows, so that timing takes no part in the outcome."""
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
        """Everything that takes part in the outcome, as canonical JSON: a run is only taken up with the same."""
        names = (
            "name",
            "model",
            "evaluation_data",
            "classes",
            "rounds",
            "clients_per_round",
            "training",
            "learning_rate_decay",
            "method",
            "merge",
            "server_optimiser",
            "update_codec",
            "distillation",
            "norms",
            "calibrate_every",
            "rates",
            "seed",
            "max_client_share",
            "suspicion",
            "quorum",
        )
        more = (
            "communication_s",
            "log_quantile",
            "training_s",
            "clock",
            "max_attempts",
            "exports_per_round",
            "targets",
            "deploy_targets",
            "memory_overhead_bytes",
            "memory_limits",
        )
        settings = {name: getattr(self, name) for name in (*names, *more, "deploy_quantisation")}
        return canonical_json(settings).decode()
