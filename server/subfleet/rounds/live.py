"""The part of a run's state that is not in the journal: present clients, times, open requests. Plain data.

A server that restarts collects all of it again. How long the run waits for a client follows from its earlier answers:

The run waits for a punctual client until the deadline. After a miss it waits once more, for a short time that follows
from the durations of the client's earlier answers. After two misses in a row the client is an extra: it still gets
tasks, and its answer counts if it comes before all others have answered, but the run does not wait for it. An accepted
answer makes it punctual again.

An extra that is slower than the others could never answer in time. So the run waits for it again, for the same short
time, after 8 misses in a row, after 16, and so on: a client that never answers costs a run of n rounds log(n) short
waits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from subfleet.protocol.messages import Profile, Telemetry
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.work import CostRequest, GenerationRequest, NetworksRequest, ProposedGeneration, SearchRequest
from subfleet.search.candidates import Candidate
from subfleet.search.estimates import Estimates
from subfleet.search.query import Search

if TYPE_CHECKING:
    from subfleet.rounds.signals import SingleEvent

Duty = Literal["telemetry", "training", "scores", "evaluation", "paths"]
"""What a client is asked for: telemetry, an update, scores of candidates, an evaluation of the model, scores of paths.
Punctuality is tracked for each: a client that trains may have no data to evaluate on."""

EXTRA_FROM = 2
"""Misses in a row after which the run does not wait for a client."""
_AGAIN_FROM = 8
"""Misses in a row after which the run waits once more; then after twice as many, and so on."""
_UNKNOWN_FRACTION = 1 / 4
"""The wait as a fraction of a deadline, if no duration of an answer is known."""
_LEAST_FRACTION = 1 / 16
"""The shortest wait as a fraction of a deadline, since the next task may be larger."""
_GENEROUS = 2.0
"""The wait for an answer as a multiple of the longest known duration."""
_REMEMBERED = 3
"""Number of answers with stored durations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Punctuality:
    """How punctually a client has answered one kind of task.

    Attributes:
        missed: number of unanswered tasks in a row.
        took_s: seconds from sending a task until its answer was accepted, of the last few answers.
    """

    missed: int = 0
    took_s: tuple[float, ...] = ()

    @property
    def extra(self) -> bool:
        """Whether the client gets its tasks in addition to the others, not in place of one."""
        return self.missed >= EXTRA_FROM

    @property
    def awaited(self) -> bool:
        """Whether the run waits for the client's next answer; for an extra only occasionally."""
        again = self.missed >= _AGAIN_FROM and not self.missed & (self.missed - 1)
        return again or not self.extra

    def patience_s(self, deadline_s: float) -> float:
        """How many seconds the run waits for an answer after sending the task, above 0 and at most the deadline.

        Args:
            deadline_s: the deadline of all such tasks, above 0.
        """
        if not self.missed:
            return deadline_s
        if not self.took_s:
            return _UNKNOWN_FRACTION * deadline_s
        return min(deadline_s, max(_GENEROUS * max(self.took_s), _LEAST_FRACTION * deadline_s))

    def after_answer(self, took_s: float) -> "Punctuality":
        """The record after an accepted answer, which resets the misses."""
        return replace(self, missed=0, took_s=(*self.took_s, max(0.0, took_s))[-_REMEMBERED:])

    def after_miss(self) -> "Punctuality":
        """The record after an unanswered task."""
        return replace(self, missed=self.missed + 1)


PUNCTUAL = Punctuality()
"""The record of an unknown client."""


Requested = CostRequest | SearchRequest | NetworksRequest | GenerationRequest
"""Requests that are made once for all clients."""
_UNKNOWN: Mapping[Duty, Punctuality] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """A client of the fleet, whether it takes part or not, as far as this server has heard it.

    Attributes:
        heard_s: monotonic time of its last sign of life; None if it has gone or was never heard.
        departure: whether it said goodbye, or the broker reported its loss (its will); else empty.
        farewell: the reason in its goodbye; empty without one.
        silent_since: the round that it did not answer first, if it has not been heard since; else 0.
        noted_s: monotonic time of its last message or will, or of the server's start if it was known before.
        punctuality: the punctuality of its answers to each kind of task.
    """

    session_id: str = ""
    heard_s: float | None = None
    departure: Literal["", "goodbye", "will"] = ""
    farewell: str = ""
    silent_since: int = 0
    noted_s: float = 0.0
    punctuality: Mapping[Duty, Punctuality] = field(default_factory=lambda: _UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """When members were last checked for clients to forget.

    Attributes:
        until_s: the monotonic time until which none of them has been silent for too long.
        crowded: whether there would be too many of them, were it not for those with a part in the round.
        clients: round attempt and phase at that time; a client with a client state is not forgotten.
    """

    until_s: float = -math.inf
    crowded: bool = False
    clients: tuple[int, str] = (0, "")


class Survey(Protocol):
    """The telemetry of many clients for one round, which is read only where a decision needs it.

    Only clients that are there until they say otherwise answer in a survey: it says nothing new about their presence.

    Attributes:
        run_id: the run that it is for; round and attempt are those of the announcement that it answers.
        names: the clients that have answered.
        away: those of them that are not available now.
    """

    run_id: str
    round: int
    attempt: int
    names: frozenset[str]
    away: frozenset[str]

    def read(self, client_id: str) -> Telemetry:
        """The telemetry of one of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Suitability:
    """The clients whose profiles suit the run.

    Attributes:
        profiles: those that were judged.
        runtimes: by program target, the clients that run it and that suit the run.
    """

    profiles: PersistentMap[Profile] = field(default_factory=PersistentMap)
    runtimes: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEstimates:
    """Memory estimates of a target from the exporter's planner.

    Attributes:
        estimate: the cost of any size.
        candidates: the method's space with these costs, from smallest to largest.
        problem: why the target can train nothing.
    """

    estimate: Estimates = field(compare=False)  # its functions are created each time
    candidates: tuple[Candidate, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationScores:
    """Scores by devices of a generation of paths so far; see `searching`.

    Attributes:
        proposed: the generation, with the server's own scores if it has validation samples.
        supernet: the smallest subspace that contains the paths; supernet_bytes: of its weights, as they are sent.
        requested_s: monotonic time at which the generation was requested.
        sums: of each path, its scores times their weights: the labels that they were counted on, of which no answer has
            a larger fraction than `Run.max_client_fraction` in a scoring round.
        weight: sum of these weights.
        labels: number of labels that were counted.
        closed: number of closed scoring rounds.
        answers: number of answers in them.
        clients: clients that were sent a task.
        ranks: after each closed round with scores, Kendall's tau of the scores so far and the server's own; None if
            nothing is ranked.
    """

    proposed: ProposedGeneration
    supernet: Architecture
    requested_s: float
    sums: tuple[float, ...]
    supernet_bytes: int = 0
    weight: float = 0.0
    labels: int = 0
    closed: int = 0
    answers: int = 0
    clients: tuple[str, ...] = ()
    ranks: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """Times of the open round's lost attempts, which aggregated nothing, as far as this server has seen them.

    Attributes:
        since_s: monotonic time of the first one; None if there was none.
        since_attempt: the number of that attempt.
        pause_s: seconds from the last one to the next attempt.
    """

    since_s: float | None = None
    since_attempt: int = 0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The half of a run's state that ends with the server.

    Attributes:
        entered_s: monotonic time at which the phase began.
        opened_s: monotonic time at which this attempt of the round was first announced.
        begun_s: in asynchronous rounds, by client, the monotonic time at which it was asked, or its task was sent.
        postponed: in asynchronous rounds, what has arrived for clients while nobody could be given a task, in order.
        estimates: memory estimates by `CostRequest.key`, if the method uses `planned_estimates`.
        searches: by target, the method's search, which knows the pool.
        written_estimates: estimated costs of written programs by their keys, if the method has a search.
        scores: the scores of the generation that devices are scoring; None if they score none.
        requested: the shared requests that are open.
        begun_attempt: the attempt in which the run's first networks were chosen.
        survey: the telemetry of the open round that has not been read yet.
        suitability: of the clients that answer in surveys.
    """

    members: PersistentMap[FleetMember] = field(default_factory=PersistentMap)
    swept: Sweep = field(default_factory=Sweep)
    entered_s: float = 0.0
    opened_s: float = 0.0
    begun_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    postponed: "tuple[SingleEvent, ...]" = ()
    attempt_times: AttemptTimes = field(default_factory=AttemptTimes)
    estimates: Mapping[str, TargetEstimates] = field(default_factory=lambda: MappingProxyType({}))
    searches: Mapping[str, Search] = field(default_factory=lambda: MappingProxyType({}))
    written_estimates: Mapping[str, Candidate] = field(default_factory=lambda: MappingProxyType({}))
    scores: GenerationScores | None = None
    requested: frozenset[Requested] = frozenset()
    begun_attempt: int = 0
    survey: Survey | None = None
    suitability: Suitability = field(default_factory=Suitability)
