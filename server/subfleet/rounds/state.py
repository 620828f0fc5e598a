"""The state of a run: plain data for `coordinator`. What can happen is in `events`, what is then done in `actions`.

    waiting --> measure    enough clients are there        (failed: not within the join deadline)
    measure --> train      all have answered, or deadline  (waiting: nobody has; failed: for the join deadline)
    train   --> fold       all have answered, quorum, or deadline
    train   --> waiting    nobody has an update to fold: the same round again, after a pause (failed: late, or certain)
    fold    --> waiting    the new model is on disk        (fold: it has diverged, see `closing`)
    fold    --> evaluate   the same, and devices are to say how good it is; then waiting, see `evaluating`
    waiting --> search     the method searches for paths of a supernet; then waiting, see `searching`
    waiting --> deploy     no round is left
    deploy  --> finished   all have their models, or deadline

Who has let tasks go unanswered is not among "all", see `punctuality`.

A round in which norms are measured (`config.calibrates`) goes the same way, with tasks that train nothing.

A client's seat in a round:

    answered  --> preparing  a subnet was chosen              (skipped: none fits, not available, ...)
    answered  --> scoring    candidates were proposed, for the client to score on its own data
    scoring   --> preparing  the best one, or without scores what fits
    preparing --> out        its program fits and is sent     (preparing: a smaller one; skipped: none is left)
    out       --> done       its update is stored             (refused; missing at the deadline)
    done      --> refused    its update is left out (suspect: the model has diverged, see `closing`)
    out       --> preparing  refused for what a smaller task may do without, see `reasons`

When a round's tasks are assigned, what sizes cost and what the method's search finds may be made beside the loop: until
it is there, seats stay answered. Then a few of them are given sizes in each step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.methods.aggregator import Participant
from subfleet.methods.assigner import Unfit
from subfleet.protocol.memory import PackingWidth
from subfleet.protocol.messages import MAX_SAMPLES, Evaluated, Profile, Task, Update
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.readings import Budget
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.attempts import Tries
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.punctuality import Duty, Punctuality
from subfleet.rounds.reasons import Lasts
from subfleet.rounds.suspicion import ChangeSize
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import CostRequest, GenerationRequest, NetworksRequest, ProposedGeneration, SearchRequest
from subfleet.rounds.written import ModelFile, WrittenProgram
from subfleet.search.candidates import Candidate
from subfleet.search.query import FoundSize, Search
from subfleet.search.queue import SizedProgram, Wish

__all__ = [
    "Exclusion",
    "GenerationScores",
    "LastEvaluation",
    "Member",
    "Phase",
    "RunState",
    "Seat",
    "Stage",
    "Suspicion",
    "Swept",
    "TargetPrices",
    "remembered",
]

Phase = Literal["waiting", "measure", "train", "fold", "evaluate", "search", "deploy", "finished", "failed"]
Stage = Literal["answered", "scoring", "preparing", "out", "done", "suspect", "refused", "skipped", "missing"]


_UNKNOWN: Mapping[Duty, Punctuality] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client of the fleet, whether it takes part or not.

    Attributes:
        heard_s: monotonic time of its last sign of life; None where it is gone or was never heard.
        gone: its last word was that it goes, or the broker said so in its place (its will); else empty.
        farewell: why it goes, as its goodbye said; empty where it said none.
        silent_since: the round at whose start it was missed first, where it has not been heard since; else 0.
        noted_s: monotonic time of its last message or will, or of the start of the server that knew it from before.
        punctuality: how it has answered lately, by what it was asked for. A server that starts anew has forgotten it,
            and waits until a deadline once more.
    """

    profile: Profile | None = None
    session_id: str = ""
    heard_s: float | None = None
    gone: Literal["", "goodbye", "will"] = ""
    farewell: str = ""
    silent_since: int = 0
    noted_s: float = 0.0
    punctuality: Mapping[Duty, Punctuality] = field(default_factory=lambda: _UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One client's place in a round.

    Attributes:
        packing_width: of its kernels, as its profile told.
        macs_per_s: multiply-accumulates that it trains with in a second, as its profile told; None is unknown.
        lasting: the same as its replayed log has it but for a share of the time; None where it told nothing of a log.
        attempt: how many tasks it was given before in this round.
        sample_count: of the client's data, as its profile told before the round: its update counts no more.
        telemetry_id: of the message in which it told what it can give.
        class_counts: samples of each of the run's classes in the client's data.
        architecture: the size that it has declared, where the method goes by that; else None.
        brought: in place of that the network of its own that it has declared.
        data_warning: why its inputs and the evaluation data do not go together; empty where nothing says so.
        proposals: sizes that it was to score in this round; empty where there was nothing to score.
        size: what it was given, kept at the front of every axis; None before one is chosen.
        spec: the same, as placed in the model.
        student: the nested subnet of self-distillation; None where there is none.
        paths: how it draws paths of its subnet, where that is a subspace.
        wanted: what the method would rather have given, had its program been written; None where it was given that.
        first_wanted: the same of the first size that it was given in the round, which tells what is written ahead.
        limit: what kept it from a larger size, see `deciding.deciding_limit`.
        refusals: why it refused tasks of this round, in order.
        reason: why it was refused, skipped or is missing.
        lasts: whether another attempt comes to the same, where it was refused or skipped.
        task: what was sent to it, kept so that it is sent again unchanged.
        result: its accepted update.
        change: how far that moves what it trained.
        outlier: in what its update is unlike the others, or why it is left out; empty where it is like them.
        scale: what its update and its weight are multiplied by when it is folded, above 0 and at most 1.
        took_s: seconds from the sending of its task until its update was stored, by this server's clock; 0 before.
        evaluated: what it found, in the evaluate phase.
        models: its inference models, in the deploy phase.
    """

    client_id: str
    device: str
    stage: Stage
    runtime: str = ""
    packing_width: PackingWidth | None = None
    macs_per_s: float | None = None
    budget: Budget | None = None
    lasting: Budget | None = None
    memory_free_bytes: int | None = None
    memory_budget_bytes: int = 0
    attempt: int = 0
    sample_count: int = MAX_SAMPLES
    class_counts: tuple[int, ...] = ()
    data_warning: str = ""
    telemetry_id: str = ""
    architecture: SubnetSpec | None = None
    brought: AnyFamily | None = None
    proposals: tuple[SubnetSpec, ...] = ()
    size: SubnetSpec | None = None
    spec: SubnetSpec | None = None
    student: SubnetSpec | None = None
    paths: PathSettings | None = None
    wanted: Wish | None = None
    first_wanted: Wish | None = None
    limit: str = ""
    refusals: tuple[str, ...] = ()
    reason: str = ""
    lasts: Lasts = "passing"
    task: Task | None = None
    result: Update | None = None
    change: ChangeSize = field(default_factory=ChangeSize)
    outlier: str = field(default="", metadata=ADDED_LATER)
    scale: float = field(default=1.0, metadata=ADDED_LATER)
    took_s: float = 0.0
    evaluated: Evaluated | None = None
    models: tuple[ModelFile, ...] = ()

    @property
    def open(self) -> bool:
        """Whether this client is still to be given something, or an answer of it is awaited."""
        return self.stage in ("answered", "scoring", "preparing", "out")

    @property
    def participant(self) -> Participant | None:
        """The client with its subnet; None before one is chosen."""
        if self.size is None or self.spec is None:
            return None
        return Participant(
            client_id=self.client_id,
            spec=self.spec,
            size=self.size,
            class_counts=self.class_counts,
            examples=() if self.result is None else self.result.operator_examples,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEvaluation:
    """What a client found when it last evaluated a model, and after which round."""

    round: int
    evaluated: Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPrices:
    """What memory costs on a target, as the exporter's planner told.

    Attributes:
        memory: of any size; None where nothing can be trained on the target.
        candidates: the method's space with these costs, from smallest to largest.
        problem: why there is none.
    """

    memory: MemoryPrices | None
    candidates: tuple[Candidate, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A client takes no part up to and with a round, and why."""

    until_round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """What rounds tell about the updates of the next ones.

    Attributes:
        loss: of the last closed round's evaluation; None before there is one.
        changes: the usual change of each of the last closed rounds.
        spoiled: tries of the open round that could not be folded, whoever was left out.
        excluded: the clients that take no part for now.
    """

    loss: float | None = None
    changes: tuple[ChangeSize, ...] = ()
    spoiled: int = 0
    excluded: Mapping[str, Exclusion] = field(default_factory=lambda: MappingProxyType({}))


def remembered(terms: Terms, state: "RunState") -> Any:
    """What the method remembers: at first what it begins with."""
    return terms.roles.memory.initial if state.memory is None else state.memory


def _nothing() -> Mapping[str, "Seat"]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """When members were last looked through for those to forget.

    Attributes:
        until_s: the monotonic time up to which none of them has been silent for too long.
        seats: of the try and phase in which that was; who has a seat is not forgotten.
    """

    until_s: float = -math.inf
    seats: tuple[int, str] = (0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationScores:
    """What devices have told so far of a generation of paths; see `federated_scoring`.

    Attributes:
        made: the generation, with the server's own scores where it has validation samples.
        supernet: the smallest subspace that holds its paths; supernet_bytes: of its weights, as they are sent.
        asked_s: monotonic time at which the generation was asked for.
        sums: of each path, its scores times what each counts by: the labels that they were counted on, of which no
            answer has more than `Run.max_client_share` in a round of scoring.
        weight: by which they counted together.
        labels: that were counted.
        closed: rounds of scoring that are over.
        answers: that came in them.
        asked: clients that were sent a task.
        ranks: after each closed round in which there were scores, Kendall's tau of the scores so far and the server's
            own; None where nothing is ranked.
    """

    made: ProposedGeneration
    supernet: SubnetSpec
    asked_s: float
    sums: tuple[float, ...]
    supernet_bytes: int = 0
    weight: float = 0.0
    labels: int = 0
    closed: int = 0
    answers: int = 0
    asked: tuple[str, ...] = ()
    ranks: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands.

    All survives a crash but `members`, `swept`, `entered_s`, `opened_s`, `prices`, `searches`, `written_prices`,
    `asked`, `scores`, `begun_turn` and what `Tries` leaves out: prices and searches follow from the rest, and are asked
    for again.

    Attributes:
        round: the open or last round; 0 before the first.
        folded_round: the round whose model is the current one; 0 is the initial model.
        entered_s: monotonic time at which the phase began.
        opened_s: monotonic time at which this try of the round was first announced.
        seats: of the open round, or of the deploy phase, by client; while the round waits, of its last try.
        tries: those that left nothing to fold.
        last: each client's seat in the last round that folded it: from it follows the model it is given.
        pool: sizes that the method's search has found so far, in the order in which they were found.
        written: the programs written so far, by their keys.
        explored_turn: the last turn for whose clients the search has looked; its finds are in the pool.
        wished_turn: the last turn whose clients had all been given a first size, so that their wishes were weighed.
        prices: by `CostRequest.key`, what memory costs there, where the method goes by `planned_prices`.
        searches: by target, the method's search, which has learned the pool.
        written_prices: by their keys, what programs that were written cost by prices, where the method has a search.
        generations: of the search after the last folded round, those that have been scored.
        scores: of the generation that devices are scoring; None where they score none.
        asked: which prices, searches and generations are being made.
        queue: programs that are being written for later rounds.
        unfit: by "client/target/size's id", why a device said that its runtime cannot run the program that trains it;
            by "client/score/target/size's id", the one that scores it. It is not given it again until it starts anew.
        disks: by client, what its last refusal for the disk said that may be written, until it starts anew.
        brought: by client, digests of the networks of its own that it has ever declared.
        suspicion: what rounds tell about the updates of the next ones.
        memory: what the method remembers; None as long as nothing was added to what it begins with, see `remembered`.
        lineages: of all networks that the run has had, in the order in which they appeared; empty as long as there was
            none but the one that it begins with, see `networks`.
        settled: tasks of the last closed round whose updates were accepted, and those of its evaluation, to answer
            their repetitions.
        evaluated: what each client found last, see `evaluating`.
        failure: why the run failed.
    """

    round: int = 0
    folded_round: int = 0
    phase: Phase = "waiting"
    entered_s: float = 0.0
    opened_s: float = 0.0
    members: PersistentMap[Member] = field(default_factory=PersistentMap)
    swept: Swept = field(default_factory=Swept)
    seats: Mapping[str, Seat] = field(default_factory=_nothing)
    last: Mapping[str, Seat] = field(default_factory=_nothing)
    pool: tuple[FoundSize, ...] = ()
    explored_turn: int = 0
    wished_turn: int = 0
    prices: Mapping[str, TargetPrices] = field(default_factory=lambda: MappingProxyType({}))
    searches: Mapping[str, Search] = field(default_factory=lambda: MappingProxyType({}))
    written_prices: Mapping[str, Candidate] = field(default_factory=lambda: MappingProxyType({}))
    generations: int = 0
    scores: GenerationScores | None = None
    asked: frozenset[CostRequest | SearchRequest | NetworksRequest | GenerationRequest] = frozenset()
    begun_turn: int = 0
    queue: tuple[SizedProgram, ...] = ()
    written: Mapping[str, WrittenProgram] = field(default_factory=lambda: MappingProxyType({}))
    unfit: Mapping[str, Unfit] = field(default_factory=lambda: MappingProxyType({}))
    disks: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    brought: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    suspicion: Suspicion = field(default_factory=Suspicion)
    memory: Any = None
    lineages: tuple[Lineage, ...] = ()
    settled: frozenset[str] = frozenset()
    evaluated: Mapping[str, LastEvaluation] = field(default_factory=lambda: MappingProxyType({}))
    tries: Tries = field(default_factory=Tries)
    failure: str = ""

    @property
    def turn(self) -> int:
        """Number of the try of a round, counted over the whole run: at its time logs are read that are replayed."""
        return self.round + self.tries.lost

    @property
    def retry(self) -> int:
        """How often the open round was tried before without anything to fold."""
        return self.tries.retry
