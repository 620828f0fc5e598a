"""The state of a run: plain data for `coordinator`. Its events and actions are in `signals`.

    waiting   --> measure    enough clients are present      (failed: not within the join deadline)
    measure   --> train      all have answered, or deadline  (waiting: none has; failed: none within the join deadline)
    train     --> aggregate  all have answered, quorum, or deadline
    train     --> waiting    no client has an update: the round is attempted again after a pause, see `closing`
    aggregate --> waiting    the new model is on disk        (aggregate: it has diverged, see `closing`)
    aggregate --> evaluate   the same, if devices evaluate it; then waiting, see `evaluating`
    waiting   --> search     the method searches for paths of a supernet; then waiting, see `searching`
    waiting   --> deploy     no round is left
    deploy    --> finished   all have their models, or deadline

Clients that have not answered their last tasks do not count among "all", see `live`.

Asynchronous rounds have no phase "measure", and clients stay from one round to the next, see `buffering`.

A round that calibrates norms (`config.calibrates`) has the same phases; its tasks train nothing.

The state of a client in a round:

    asked     --> answered   asynchronous rounds alone: its telemetry has arrived
    answered  --> preparing  a submodel was chosen            (skipped: none fits, its data do not suit the run, ...)
    answered  --> scoring    the client scores proposed candidates on its own data
    scoring   --> preparing  the best candidate, or without scores the largest that fits
    preparing --> out        its program fits and is sent     (preparing: a smaller one; skipped: none is left)
    out       --> done       its update is stored             (refused; missing at the deadline)
    done      --> refused    its update is left out (suspect: the model has diverged, see `closing`)
    out       --> preparing  the client refused its task, and a smaller one may do, see `obstacles`

When the training begins, clients that were not drawn or are not available give up their states: they are idle.

Cost estimates and the method's search may be computed beside the loop before sizes are chosen. Until their results are
there, client states stay answered; then a few clients are given sizes in each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.methods.aggregator import Participant
from subfleet.protocol.memory_plan import PackingWidth
from subfleet.protocol.messages import MAX_SAMPLES, Evaluated, Profile, Task, Update
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import FleetMember, LiveState
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.progress import Failed, FailedAttempts, Phase, PhaseName, Searching, Waiting
from subfleet.rounds.work import ModelFile
from subfleet.search.candidates import Obstacle
from subfleet.search.query import FoundSize
from subfleet.search.queue import RequestedProgram, SizedProgram, WrittenProgram

Stage = Literal["asked", "answered", "scoring", "preparing", "out", "done", "suspect", "refused", "skipped", "missing"]
Lasts = Literal["passing", "unclear", "lasting"]
"""Whether another attempt has the same outcome: "lasting" means yes, since its causes do not change between attempts;
"passing" means maybe not, since budgets change; "unclear" means yes if the device gives the same reason again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a client offers in a round, from its profile and its telemetry.

    Attributes:
        runtime: the program target that it runs.
        packing_width: the packing width of its kernels.
        macs_per_s: multiply-accumulates per second in training; None is unknown.
        training_watts: power of its training; None is unknown.
        budget: the most that a task may cost it now.
        lasting: the budget that its replayed log offers for most of its time; None if it reported none.
        memory_free_bytes: free memory as the device reported it.
        memory_budget_bytes: memory for training, within the limits of the run.
        sample_count: samples in its data; its update counts no more samples.
        class_counts: samples of each of the run's classes in its data.
        data_warning: how its inputs differ from the evaluation data; empty if they do not, as far as is known.
        telemetry_id: id of the message with its telemetry.
        architecture: the size that it declares, if the method uses declarations; else None.
        brought: the network of its own that it declares instead.
    """

    runtime: str = ""
    packing_width: PackingWidth | None = None
    macs_per_s: float | None = None
    training_watts: float | None = None
    budget: Budget = field(default_factory=lambda: Budget(memory_bytes=0))
    lasting: Budget | None = None
    memory_free_bytes: int | None = None
    memory_budget_bytes: int = 0
    sample_count: int = MAX_SAMPLES
    class_counts: tuple[int, ...] = ()
    data_warning: str = ""
    telemetry_id: str = ""
    architecture: Architecture | None = None
    brought: AnyFamily | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submodel:
    """The submodel that a client was given.

    Attributes:
        size: the submodel with its indices at the front of every axis.
        architecture: the same submodel, as placed in the model.
        student: the nested submodel of self-distillation; None without self-distillation.
        paths: how the client draws paths, if the submodel is a subspace of a supernet.
        requested: the program of the size that the method preferred, but that is not written yet; None if it had its
            choice.
    """

    size: Architecture
    architecture: Architecture
    student: Architecture | None = None
    paths: PathSettings | None = None
    requested: RequestedProgram | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedUpdate:
    """The accepted update of a training task.

    Attributes:
        change: how far the update moves the tensors that were trained.
        scale: factor of the update and its weight in aggregation, above 0 and at most 1.
        took_s: seconds from sending the task until the update was stored, by this server's clock.
    """

    update: Update
    change: ChangeSize = field(default_factory=ChangeSize)
    scale: float = 1.0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    """The state of a client in a round: its offer, its submodel, and its answers to each kind of task.

    Attributes:
        reason: why it was refused, skipped or is missing.
        lasts: whether another attempt has the same outcome, if it was refused or skipped.
        refusals: why it refused tasks of this round, in order.
        attempt: number of tasks that it was given before in this round.
        proposals: sizes that it was to score in this round; empty if there was nothing to score.
        given: its submodel; None before one is chosen, and if none fits.
        first_requested: the program that the method would have preferred for the first submodel of the round; such
            programs are written ahead.
        limit: the limits that kept it from a larger size, see `assigning.find_deciding_limit`.
        task: its task, stored so that it can be sent again unchanged.
        trained: the result of a training task; evaluated: of an evaluation task.
        outlier: how its update differs from the others, or why it is left out; empty if it does not differ.
        models: its inference models, in the deploy phase.
    """

    client_id: str
    device: str
    stage: Stage
    reason: str = ""
    lasts: Lasts = "passing"
    refusals: tuple[str, ...] = ()
    attempt: int = 0
    offer: Offer = field(default_factory=Offer)
    proposals: tuple[Architecture, ...] = ()
    given: Submodel | None = None
    first_requested: RequestedProgram | None = None
    limit: str = ""
    task: Task | None = None
    trained: AcceptedUpdate | None = None
    outlier: str = ""
    evaluated: Evaluated | None = None
    models: tuple[ModelFile, ...] = ()

    @property
    def open(self) -> bool:
        """Whether the round is not over for this client: it waits for a task, or its answer is outstanding."""
        return self.stage in ("asked", "answered", "scoring", "preparing", "out")

    @property
    def size(self) -> Architecture | None:
        """The size of its submodel; None if it has none."""
        return None if self.given is None else self.given.size

    @property
    def architecture(self) -> Architecture | None:
        """Its submodel as placed in the model; None if it has none."""
        return None if self.given is None else self.given.architecture

    @property
    def update(self) -> Update | None:
        """Its accepted update; None before there is one."""
        return None if self.trained is None else self.trained.update

    @property
    def scale(self) -> float:
        """The factor of its update, see `AcceptedUpdate.scale`."""
        return 1.0 if self.trained is None else self.trained.scale

    @property
    def participant(self) -> Participant | None:
        """The client with its submodel, in the form that methods get; None before one is chosen."""
        if self.given is None:
            return None
        return Participant(
            client_id=self.client_id,
            architecture=self.given.architecture,
            size=self.given.size,
            class_counts=self.offer.class_counts,
            examples=() if self.update is None else self.update.operator_examples,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """The exclusion of a client up to and including a round, with its reason."""

    until_round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierDetection:
    """The results of earlier rounds that the outlier detection uses.

    Attributes:
        loss: the loss of the model of the last closed round; None before there is one.
        changes: the usual change of each of the last closed rounds.
        spoiled: diverged attempts of the open round, whichever updates were left out.
        excluded: the clients that are excluded for now.
    """

    loss: float | None = None
    changes: tuple[ChangeSize, ...] = ()
    spoiled: int = 0
    excluded: Mapping[str, Exclusion] = field(default_factory=lambda: MappingProxyType({}))


def get_memory(context: RunContext, state: "RunState") -> Any:
    """The method's memory: its initial one until something was added."""
    return context.roles.memory.initial if state.memory is None else state.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run: every field survives a crash, in the journal, except `live`.

    Attributes:
        round: the open or last round; 0 before the first.
        aggregated_round: the round of the current model; 0 is the initial model.
        at: the phase.
        profiles: the profile of each client of the fleet.
        clients: client states of the open round, or of the deploy phase; while the run waits, of the last attempt.
        idle: the clients that have answered in that round and have no client state, because nothing is to be done with
            them: by reason, and by client id the id of its telemetry, or an empty text if nobody needs to be told.
        failed_attempts: the attempts that aggregated nothing.
        last: each client's state in the last round that aggregated its update; its own model follows from it.
        pool: sizes that the method's search has found so far, in the order in which they were found.
        written: the programs written so far, by their keys.
        explored_attempt: the last attempt that the search has explored sizes for; they are in the pool.
        requested_attempt: the last attempt in which all clients have a first size, so that programs were requested.
        queue: programs that are being written for later rounds.
        unfit: by "client/target/size's id", why the device's runtime cannot run the program that trains the size; by
            "client/score/target/size's id", the program that scores it. The device is not given the program again until
            it restarts.
        disks: by client, the bytes that it reported as free when it last refused a task for its disk, until it
            restarts.
        brought: by client, digests of all networks of its own that it has declared.
        outliers: the results of earlier rounds that the outlier detection uses.
        memory: the method's memory; None until something was added to its initial one, see `get_memory`.
        lineages: the lineages of all networks of the run, in the order in which they appeared; empty if there was only
            the first, see `networks`.
        settled: ids of the accepted tasks of the last closed round and of its evaluation, to answer repeated messages.
        evaluated: the last evaluation by each client, see `evaluating`.
    """

    round: int = 0
    aggregated_round: int = 0
    at: Phase = field(default_factory=Waiting)
    profiles: PersistentMap[Profile] = field(default_factory=PersistentMap)
    clients: Mapping[str, ClientState] = field(default_factory=lambda: MappingProxyType({}))
    idle: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    last: Mapping[str, ClientState] = field(default_factory=lambda: MappingProxyType({}))
    pool: tuple[FoundSize, ...] = ()
    explored_attempt: int = 0
    requested_attempt: int = 0
    queue: tuple[SizedProgram, ...] = ()
    written: Mapping[str, WrittenProgram] = field(default_factory=lambda: MappingProxyType({}))
    unfit: Mapping[str, Obstacle] = field(default_factory=lambda: MappingProxyType({}))
    disks: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    brought: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    outliers: OutlierDetection = field(default_factory=OutlierDetection)
    memory: Any = None
    lineages: tuple[Lineage, ...] = ()
    settled: frozenset[str] = frozenset()
    evaluated: Mapping[str, Evaluated] = field(default_factory=lambda: MappingProxyType({}))
    failed_attempts: FailedAttempts = field(default_factory=FailedAttempts)
    live: LiveState = field(default_factory=LiveState)

    @property
    def phase(self) -> PhaseName:
        """The name of the phase."""
        return self.at.TYPE

    @property
    def failure(self) -> str:
        """Why the run has failed; empty if it has not."""
        return self.at.why if isinstance(self.at, Failed) else ""

    @property
    def generations(self) -> int:
        """Number of scored generations of the open search."""
        return self.at.generations if isinstance(self.at, Searching) else 0

    @property
    def run_attempt(self) -> int:
        """Number of the round attempt, counted over the whole run; replayed logs are read at its time."""
        return self.round + self.failed_attempts.lost

    @property
    def attempt(self) -> int:
        """Number of earlier attempts of the open round, which aggregated nothing."""
        return self.failed_attempts.count

    def with_clients(self, *clients: ClientState) -> "RunState":
        """The state with these client states added or replaced."""
        return replace(
            self, clients=MappingProxyType({**self.clients, **{client.client_id: client for client in clients}})
        )

    def without_clients(self) -> "RunState":
        """The state without any client state."""
        return replace(self, clients=MappingProxyType({}), idle=MappingProxyType({}))

    def enter(self, phase: Phase, now_s: float) -> "RunState":
        """The state at the beginning of a phase."""
        return replace(self, at=phase, live=replace(self.live, entered_s=now_s))

    def fail(self, why: str, now_s: float) -> "RunState":
        """The state of a failed run."""
        return self.enter(Failed(why=why), now_s)

    def restart(self, now_s: float) -> "RunState":
        """The state for a server that starts now: it has heard no client, and deadlines restart."""
        members = PersistentMap({name: FleetMember(noted_s=now_s) for name in self.profiles})
        return replace(self, live=LiveState(members=members, entered_s=now_s, opened_s=now_s))
