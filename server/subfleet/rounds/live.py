"""What a server knows of a run that no journal has: who is there, times on its clock, what is asked for. Plain data.

A server that starts anew asks for all of it again.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.punctuality import Duty, Punctuality
from subfleet.rounds.work import CostRequest, GenerationRequest, NetworksRequest, ProposedGeneration, SearchRequest
from subfleet.search.candidates import Candidate
from subfleet.search.query import Search

__all__ = ["GenerationScores", "LiveState", "Member", "Requested", "RetryTimes", "Swept", "TargetPrices"]

Requested = CostRequest | SearchRequest | NetworksRequest | GenerationRequest
"""What is made once for all clients."""
_UNKNOWN: Mapping[Duty, Punctuality] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
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
class Swept:
    """When members were last looked through for those to forget.

    Attributes:
        until_s: the monotonic time up to which none of them has been silent for too long.
        seats: attempt and phase at that time; a client with a seat is not forgotten.
    """

    until_s: float = -math.inf
    seats: tuple[int, str] = (0, "")


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
        prices: by `CostRequest.key`, what memory costs there, where the method goes by `planned_prices`.
        searches: by target, the method's search, which has learned the pool.
        written_prices: by their keys, what programs that were written cost by prices, where the method has a search.
        scores: of the generation that devices are scoring; None where they score none.
        requested: which prices, searches and generations are being made.
        begun_turn: the turn in which the networks that the run begins with were chosen.
    """

    members: PersistentMap[Member] = field(default_factory=PersistentMap)
    swept: Swept = field(default_factory=Swept)
    entered_s: float = 0.0
    opened_s: float = 0.0
    retries: RetryTimes = field(default_factory=RetryTimes)
    prices: Mapping[str, TargetPrices] = field(default_factory=lambda: MappingProxyType({}))
    searches: Mapping[str, Search] = field(default_factory=lambda: MappingProxyType({}))
    written_prices: Mapping[str, Candidate] = field(default_factory=lambda: MappingProxyType({}))
    scores: GenerationScores | None = None
    requested: frozenset[Requested] = frozenset()
    begun_turn: int = 0

    @classmethod
    def of_clients(cls, client_ids: Iterable[str], now_s: float) -> "LiveState":
        """The live state of a server that starts now and has heard none of these clients yet."""
        members = {name: Member(noted_s=now_s) for name in client_ids}
        return cls(members=PersistentMap(members), entered_s=now_s, opened_s=now_s)
