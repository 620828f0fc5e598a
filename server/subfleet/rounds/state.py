"""The state of a run: plain data for `coordinator`. What can happen is in `events`, what is then done in `actions`.

    waiting   --> measure    enough clients are there        (failed: not within the join deadline)
    measure   --> train      all have answered, or deadline  (waiting: nobody has; failed: for the join deadline)
    train     --> aggregate  all have answered, quorum, or deadline
    train     --> waiting    nobody has an update: the same round again, after a pause (failed: late, or certain)
    aggregate --> waiting    the new model is on disk        (aggregate: it has diverged, see `closing`)
    aggregate --> evaluate   the same, and devices are to say how good it is; then waiting, see `advance_evaluation`
    waiting   --> search     the method searches for paths of a supernet; then waiting, see `advance_search`
    waiting   --> deploy     no round is left
    deploy    --> finished   all have their models, or deadline

Who has let tasks go unanswered is not among "all", see `live`.

A round in which norms are measured (`config.calibrates`) goes the same way, with tasks that train nothing.

A client's state in a round:

    answered  --> preparing  a submodel was chosen            (skipped: none fits, not available, ...)
    answered  --> scoring    candidates were proposed, for the client to score on its own data
    scoring   --> preparing  the best one, or without scores what fits
    preparing --> out        its program fits and is sent     (preparing: a smaller one; skipped: none is left)
    out       --> done       its update is stored             (refused; missing at the deadline)
    done      --> refused    its update is left out (suspect: the model has diverged, see `closing`)
    out       --> preparing  refused for what a smaller task may do without, see `refusals`

When a round's tasks are assigned, what sizes cost and what the method's search finds may be made beside the loop: until
it is there, client states stay answered. Then a few of them are given sizes in each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.methods.aggregator import Participant
from subfleet.protocol.memory import PackingWidth
from subfleet.protocol.messages import MAX_SAMPLES, Evaluated, Profile, Task, Update
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import LiveState, Requested
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.progress import Failed, Phase, PhaseName, Searching, Tries, Waiting
from subfleet.rounds.work import ModelFile
from subfleet.search.fitting import Obstacle
from subfleet.search.query import FoundSize
from subfleet.search.queue import RequestedProgram, SizedProgram, WrittenProgram

Stage = Literal["answered", "scoring", "preparing", "out", "done", "suspect", "refused", "skipped", "missing"]
Lasts = Literal["passing", "unclear", "lasting"]
"""Whether another attempt comes to the same: "passing" may not, as what there is of a budget changes; "lasting" does,
as nothing that decides it changes between attempts; "unclear" does where the device says it again in the same words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a client has and can give in a round, from its profile and its telemetry.

    Attributes:
        runtime: the program target that it runs.
        packing_width: of its kernels.
        macs_per_s: multiply-accumulates that it trains with in a second; None is unknown.
        budget: what a task may cost it now; None where it takes no part.
        lasting: the same as its replayed log has it but for a fraction of the time; None where it told nothing of a
            log.
        memory_free_bytes: as it has read.
        memory_budget_bytes: what it gives to training, within the limits of the run.
        sample_count: of its data: its update counts no more.
        class_counts: samples of each of the run's classes in its data.
        data_warning: why its inputs and the evaluation data do not go together; empty where nothing says so.
        telemetry_id: of the message in which it told what it can give.
        architecture: the size that it has declared, where the method goes by that; else None.
        brought: in place of that the network of its own that it has declared.
    """

    runtime: str = ""
    packing_width: PackingWidth | None = None
    macs_per_s: float | None = None
    budget: Budget | None = None
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
        size: kept at the front of every axis.
        architecture: the same, as placed in the model.
        student: the nested submodel of self-distillation; None where there is none.
        paths: how the client draws paths of it, where it is a subspace.
        wanted: what the method would rather have given, had its program been written; None where it was given that.
    """

    size: Architecture
    architecture: Architecture
    student: Architecture | None = None
    paths: PathSettings | None = None
    wanted: RequestedProgram | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedUpdate:
    """What came back from a training task.

    Attributes:
        update: that was accepted.
        change: how far it moves what was trained.
        scale: what the update and its weight are multiplied by when it is aggregated, above 0 and at most 1.
        took_s: seconds from the sending of the task until the update was stored, by this server's clock.
    """

    update: Update
    change: ChangeSize = field(default_factory=ChangeSize)
    scale: float = 1.0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    """One client's place in a round: what it offers, what it was given, and what came back of each kind of task.

    Attributes:
        reason: why it was refused, skipped or is missing.
        lasts: whether another attempt comes to the same, where it was refused or skipped.
        refusals: why it refused tasks of this round, in order.
        attempt: how many tasks it was given before in this round.
        proposals: sizes that it was to score in this round; empty where there was nothing to score.
        given: None before a submodel is chosen, and where none fits.
        first_wanted: what the method would rather have given in place of the first submodel of the round, which tells
            what is written ahead.
        limit: what kept it from a larger size, see `assigning.find_deciding_limit`.
        task: what was sent to it, kept so that it is sent again unchanged.
        trained: what came of a training task; evaluated: of an evaluation task.
        outlier: in what its update is unlike the others, or why it is left out; empty where it is like them.
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
    first_wanted: RequestedProgram | None = None
    limit: str = ""
    task: Task | None = None
    trained: AcceptedUpdate | None = None
    outlier: str = ""
    evaluated: Evaluated | None = None
    models: tuple[ModelFile, ...] = ()

    @property
    def open(self) -> bool:
        """Whether this client is still to be given something, or an answer of it is awaited."""
        return self.stage in ("answered", "scoring", "preparing", "out")

    @property
    def size(self) -> Architecture | None:
        """Of the submodel that it was given; None where it was given none."""
        return None if self.given is None else self.given.size

    @property
    def architecture(self) -> Architecture | None:
        """The same submodel as placed in the model."""
        return None if self.given is None else self.given.architecture

    @property
    def update(self) -> Update | None:
        """Its accepted update; None before it has trained."""
        return None if self.trained is None else self.trained.update

    @property
    def scale(self) -> float:
        """What its update counts by, see `Trained.scale`."""
        return 1.0 if self.trained is None else self.trained.scale

    @property
    def participant(self) -> Participant | None:
        """The client with its submodel; None before one is chosen."""
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
class LastEvaluation:
    """What a client found when it last evaluated a model, and after which round."""

    round: int
    evaluated: Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A client takes no part up to and with a round, and why."""

    until_round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierDetection:
    """What rounds tell about the updates of the next ones.

    Attributes:
        loss: of the last closed round's evaluation; None before there is one.
        changes: the usual change of each of the last closed rounds.
        spoiled: tries of the open round that could not be aggregated, whoever was left out.
        excluded: the clients that take no part for now.
    """

    loss: float | None = None
    changes: tuple[ChangeSize, ...] = ()
    spoiled: int = 0
    excluded: Mapping[str, Exclusion] = field(default_factory=lambda: MappingProxyType({}))


def get_memory(context: RunContext, state: "RunState") -> Any:
    """What the method remembers: at first what it begins with."""
    return context.roles.memory.initial if state.memory is None else state.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands: what survives a crash, each field in the journal, and in `live` what does not.

    Attributes:
        round: the open or last round; 0 before the first.
        aggregated_round: the round whose model is the current one; 0 is the initial model.
        at: the phase.
        profiles: what each client of the fleet has declared.
        clients: of the open round, or of the deploy phase, by client; while the round waits, of its last try.
        tries: those that left nothing to aggregate.
        last: each client's state in the last round that aggregated it: from it follows the model it is given.
        pool: sizes that the method's search has found so far, in the order in which they were found.
        written: the programs written so far, by their keys.
        explored_turn: the last turn for whose clients the search has looked; its finds are in the pool.
        requested_turn: the last turn whose clients had all been given a first size, so that their requested programs
            were weighed.
        queue: programs that are being written for later rounds.
        unfit: by "client/target/size's id", why a device said that its runtime cannot run the program that trains it;
            by "client/score/target/size's id", the one that scores it. It is not given it again until it starts anew.
        disks: by client, what its last refusal for the disk said that may be written, until it starts anew.
        brought: by client, digests of the networks of its own that it has ever declared.
        outliers: what rounds tell about the updates of the next ones.
        memory: what the method remembers; None as long as nothing was added to what it begins with, see `get_memory`.
        lineages: of all networks that the run has had, in the order in which they appeared; empty as long as there was
            none but the one that it begins with, see `networks`.
        settled: tasks of the last closed round whose updates were accepted, and those of its evaluation, to answer
            their repetitions.
        evaluated: what each client found last, see `advance_evaluation`.
    """

    round: int = 0
    aggregated_round: int = 0
    at: Phase = field(default_factory=Waiting)
    profiles: PersistentMap[Profile] = field(default_factory=PersistentMap)
    clients: Mapping[str, ClientState] = field(default_factory=lambda: MappingProxyType({}))
    last: Mapping[str, ClientState] = field(default_factory=lambda: MappingProxyType({}))
    pool: tuple[FoundSize, ...] = ()
    explored_turn: int = 0
    requested_turn: int = 0
    queue: tuple[SizedProgram, ...] = ()
    written: Mapping[str, WrittenProgram] = field(default_factory=lambda: MappingProxyType({}))
    unfit: Mapping[str, Obstacle] = field(default_factory=lambda: MappingProxyType({}))
    disks: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    brought: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    outliers: OutlierDetection = field(default_factory=OutlierDetection)
    memory: Any = None
    lineages: tuple[Lineage, ...] = ()
    settled: frozenset[str] = frozenset()
    evaluated: Mapping[str, LastEvaluation] = field(default_factory=lambda: MappingProxyType({}))
    tries: Tries = field(default_factory=Tries)
    live: LiveState = field(default_factory=LiveState)

    @property
    def phase(self) -> PhaseName:
        """The name of the phase."""
        return self.at.TYPE

    @property
    def failure(self) -> str:
        """Why the run has failed; empty where it has not."""
        return self.at.why if isinstance(self.at, Failed) else ""

    @property
    def generations(self) -> int:
        """Generations of the open search that have been scored."""
        return self.at.generations if isinstance(self.at, Searching) else 0

    @property
    def turn(self) -> int:
        """Number of the try of a round, counted over the whole run: at its time logs are read that are replayed."""
        return self.round + self.tries.lost

    @property
    def retry(self) -> int:
        """How often the open round was tried before without anything to aggregate."""
        return self.tries.retry

    def with_clients(self, *clients: ClientState) -> "RunState":
        """The state with these client states in place of those of the same clients."""
        return replace(
            self, clients=MappingProxyType({**self.clients, **{client.client_id: client for client in clients}})
        )

    def enter(self, phase: Phase, now_s: float) -> "RunState":
        """The state as it enters a phase, or begins the same one anew."""
        return replace(self, at=phase, live=replace(self.live, entered_s=now_s))

    def fail(self, why: str, now_s: float) -> "RunState":
        """The state of a run that cannot go on, and why."""
        return self.enter(Failed(why=why), now_s)

    def without_request(self, made: Requested) -> "RunState":
        """The state in which nobody waits for something that was requested: it was made, or cannot be."""
        return replace(self, live=replace(self.live, requested=self.live.requested - {made}))

    def restart(self, now_s: float) -> "RunState":
        """The state as a server finds it that starts now: nobody was heard yet, and deadlines start anew."""
        return replace(self, live=LiveState.of_clients(self.profiles, now_s))
