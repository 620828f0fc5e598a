"""What a server knows of a run that no journal has: who is there, times on its clock, what is requested. Plain data.

A server that starts anew asks for all of it again. How long a client is waited for follows from its answers so far:

A client that has missed nothing is waited for until the deadline. After a miss it is waited for once more, for a short
time that follows from how long its answers took before. After the second in a row it is an extra: it still gets its
tasks, and its answer counts when it comes before the others have all answered, but nobody waits for it. An answer that
is accepted makes it a client like any other.

An extra that is slower than the others would never get an answer in. Therefore it is waited for again, for the same
short time, after 8 misses in a row, after 16, and so on: a client that never answers costs a run of n rounds the
logarithm of n short waits.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.work import CostRequest, GenerationRequest, NetworksRequest, ProposedGeneration, SearchRequest
from subfleet.search.candidates import Candidate
from subfleet.search.query import Search

Duty = Literal["telemetry", "training", "scores", "evaluation", "paths"]
"""What a client is asked for: what it can give in a round, an update, scores of candidates, how good the model is, and
scores of paths. Each is remembered by itself: a client that trains may hold no data that it could evaluate on."""

DUTIES: tuple[Duty, ...] = ("telemetry", "training", "scores", "evaluation", "paths")

EXTRA_FROM = 2
"""Misses in a row after which nobody waits."""
_AGAIN_FROM = 8
"""Misses in a row after which it is waited for once more; then after twice as many, and so on."""
_UNKNOWN_FRACTION = 1 / 4
"""Of a deadline, where it is not known how long an answer takes."""
_LEAST_FRACTION = 1 / 16
"""Of a deadline, however fast answers were: the next task may be a larger one."""
_GENEROUS = 2.0
"""In longest times: what an answer may take."""
_REMEMBERED = 3
"""Answers whose times are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Punctuality:
    """How a client has answered one kind of task lately.

    Attributes:
        missed: tasks in a row that it has not answered.
        took_s: seconds from the sending of a task until its answer was accepted, of the last few answers.
    """

    missed: int = 0
    took_s: tuple[float, ...] = ()

    @property
    def extra(self) -> bool:
        """Whether the client is asked beside the others and not in the place of one."""
        return self.missed >= EXTRA_FROM

    @property
    def awaited(self) -> bool:
        """Whether the client's next answer is waited for: that of an extra now and then."""
        again = self.missed >= _AGAIN_FROM and not self.missed & (self.missed - 1)
        return again or not self.extra

    def patience_s(self, deadline_s: float) -> float:
        """How long an answer is waited for, from the sending of the task.

        Args:
            deadline_s: of all such tasks, above 0.

        Returns:
            seconds, above 0 and at most the deadline.
        """
        if not self.missed:
            return deadline_s
        if not self.took_s:
            return _UNKNOWN_FRACTION * deadline_s
        return min(deadline_s, max(_GENEROUS * max(self.took_s), _LEAST_FRACTION * deadline_s))

    def after_answer(self, took_s: float) -> "Punctuality":
        """The record after an accepted answer, which makes up for all misses."""
        return replace(self, missed=0, took_s=(*self.took_s, max(0.0, took_s))[-_REMEMBERED:])

    def after_miss(self) -> "Punctuality":
        """The record after a task that was not answered."""
        return replace(self, missed=self.missed + 1)


PUNCTUAL = Punctuality()
"""A client of whom nothing is known."""


Requested = CostRequest | SearchRequest | NetworksRequest | GenerationRequest
"""What is made once for all clients."""
_UNKNOWN: Mapping[Duty, Punctuality] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """A client of the fleet as this server has heard it, whether it takes part or not.

    Attributes:
        heard_s: monotonic time of its last sign of life; None where it is gone or was never heard.
        gone: its last word was that it goes, or the broker said so in its place (its will); else empty.
        farewell: why it goes, as its goodbye said; empty where it said none.
        silent_since: the round at whose start it was missed first, where it has not been heard since; else 0.
        noted_s: monotonic time of its last message or will, or of the start of the server that knew it from before.
        punctuality: how it has answered lately, by what it was asked for.
    """

    session_id: str = ""
    heard_s: float | None = None
    gone: Literal["", "goodbye", "will"] = ""
    farewell: str = ""
    silent_since: int = 0
    noted_s: float = 0.0
    punctuality: Mapping[Duty, Punctuality] = field(default_factory=lambda: _UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """When members were last looked through for those to forget.

    Attributes:
        until_s: the monotonic time up to which none of them has been silent for too long.
        clients: attempt and phase at that time; a client with a client state is not forgotten.
    """

    until_s: float = -math.inf
    clients: tuple[int, str] = (0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEstimates:
    """What memory costs on a target, as the exporter's planner told.

    Attributes:
        memory: of any size; None where nothing can be trained on the target.
        candidates: the method's space with these costs, from smallest to largest.
        problem: why there is none.
    """

    memory: MemoryEstimates | None
    candidates: tuple[Candidate, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationScores:
    """What devices have told so far of a generation of paths; see `advance_search`.

    Attributes:
        made: the generation, with the server's own scores where it has validation samples.
        supernet: the smallest subspace that holds its paths; supernet_bytes: of its weights, as they are sent.
        asked_s: monotonic time at which the generation was asked for.
        sums: of each path, its scores times what each counts by: the labels that they were counted on, of which no
            answer has more than `Run.max_client_fraction` in a round of scoring.
        weight: by which they counted together.
        labels: that were counted.
        closed: rounds of scoring that are over.
        answers: that came in them.
        asked: clients that were sent a task.
        ranks: after each closed round in which there were scores, Kendall's tau of the scores so far and the server's
            own; None where nothing is ranked.
    """

    made: ProposedGeneration
    supernet: Architecture
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
class RetryTimes:
    """When the open round left nothing to aggregate, as far as this server has seen it.

    Attributes:
        since_s: monotonic time of its first lost attempt; None where there was none.
        since_turn: the turn of that attempt.
        pause_s: seconds from the last lost attempt to the next one.
    """

    since_s: float | None = None
    since_turn: int = 0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The half of a run's state that ends with the server.

    Attributes:
        entered_s: monotonic time at which the phase began.
        opened_s: monotonic time at which this attempt of the round was first announced.
        estimates: by `CostRequest.key`, what memory costs there, where the method goes by `planned_estimates`.
        searches: by target, the method's search, which has learned the pool.
        written_estimates: by their keys, what programs that were written cost by cost estimates, where the method has a
            search.
        scores: of the generation that devices are scoring; None where they score none.
        requested: which cost estimates, searches and generations are being made.
        begun_turn: the turn in which the networks that the run begins with were chosen.
    """

    members: PersistentMap[FleetMember] = field(default_factory=PersistentMap)
    swept: Sweep = field(default_factory=Sweep)
    entered_s: float = 0.0
    opened_s: float = 0.0
    retries: RetryTimes = field(default_factory=RetryTimes)
    estimates: Mapping[str, TargetEstimates] = field(default_factory=lambda: MappingProxyType({}))
    searches: Mapping[str, Search] = field(default_factory=lambda: MappingProxyType({}))
    written_estimates: Mapping[str, Candidate] = field(default_factory=lambda: MappingProxyType({}))
    scores: GenerationScores | None = None
    requested: frozenset[Requested] = frozenset()
    begun_turn: int = 0

    @classmethod
    def of_clients(cls, client_ids: Iterable[str], now_s: float) -> "LiveState":
        """The live state of a server that starts now and has heard none of these clients yet."""
        members = {name: FleetMember(noted_s=now_s) for name in client_ids}
        return cls(members=PersistentMap(members), entered_s=now_s, opened_s=now_s)
