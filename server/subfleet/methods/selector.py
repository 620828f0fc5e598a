"""The selector of a method: which clients take part in a round. By default they are drawn at random."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.elastic.network import Network
from subfleet.methods.assigner import stream_of
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture

__all__ = [
    "AvailableClient",
    "Evaluation",
    "LastUpdate",
    "Selection",
    "SelectionContext",
    "Selector",
    "at_random",
    "without_replacement",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastUpdate:
    """A client's last update that was aggregated. What the client claims in it stands within what else is known of it.

    Attributes:
        round: in which that was.
        size: what it trained.
        architecture: the same, as placed in the model.
        sample_count: that it trained on, as many as its profile told at most.
        epochs: passes over them.
        loss: mean over the labels of the last epoch, each taken before its step.
        square_loss: mean of the squares of the same; at least the square of the mean, as every mean of squares is.
        change_norm: the norm of the change of its weights, over all of them.
        train_s: seconds of the steps, as the client told.
        took_s: seconds from the task's sending until its update was stored, by the server's clock. Under a logical
            clock, and for a task that an earlier process of the server had sent, these are fewer than they were.
    """

    round: int
    size: Architecture
    architecture: Architecture
    sample_count: int
    epochs: int
    loss: float
    square_loss: float
    change_norm: float
    train_s: float
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a client found when it last evaluated the model on its held-out data, as it told.

    Attributes:
        round: after whose aggregation that was.
        loss: mean of the plain objective over the labels that counted, 0 or more.
        accuracy: share of them that were predicted rightly, 0 to 1.
        label_count: of these labels.
    """

    round: int
    loss: float
    accuracy: float
    label_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableClient:
    """A client that can take part now.

    Attributes:
        sample_count: of its data, as its profile told.
        class_counts: samples of each of the run's classes.
        budget: what it has to give now.
        expected_training_s: seconds that its training takes by cost estimates, of the size that it trained last, else
            of the smallest; 0 where it does not tell its speed.
        expected_downlink_s: the same of the weights on their way to it; 0 where its link is not known.
        expected_uplink_s: the same of the update on its way back.
        past: None before its first update was aggregated.
        evaluation: None where it has evaluated nothing yet.
    """

    client_id: str
    sample_count: int
    class_counts: tuple[int, ...] = ()
    budget: Budget
    expected_training_s: float = 0.0
    expected_downlink_s: float = 0.0
    expected_uplink_s: float = 0.0
    past: LastUpdate | None = None
    evaluation: Evaluation | None = None

    @property
    def expected_s(self) -> float:
        """Seconds that a round is expected to take it."""
        return self.expected_downlink_s + self.expected_training_s + self.expected_uplink_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionContext:
    """A round whose clients are to be chosen.

    Attributes:
        clients: those that can take part, in the order of their ids; one or more.
        count: how many are wanted, as the configuration says; 0 wants all.
        round: its number.
        retry: how often it was tried before without anything to aggregate: others may be chosen then.
        seed: of the run.
        memory: what the method remembers.
        networks: of the run that are in use, by id.
    """

    clients: tuple[AvailableClient, ...]
    count: int
    round: int
    retry: int = 0
    seed: int = 0
    memory: Any = None
    networks: Mapping[str, Network] = field(default_factory=lambda: MappingProxyType({}))

    def stream(self, purpose: str) -> random.Random:
        """A stream of random numbers of its own for each purpose and try of a round."""
        return stream_of(f"{self.seed}/{self.round}.{self.retry}/{purpose}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Who takes part.

    Attributes:
        clients: their ids, in any order; one or more of those that can.
        memory: what the method remembers from now on.
    """

    clients: tuple[str, ...]
    memory: Any = None


def at_random(context: SelectionContext) -> Selection:
    """A sample of the clients without replacement, every one equally likely (McMahan et al. 2017, algorithm 1).

    Each client draws a number that follows from the seed, the round and its own id, and the lowest win. So the choice
    depends on no order, and a client that comes or goes changes no other's number.
    """
    names = [one.client_id for one in context.clients]
    drawn = drawn_at_random(names, context.count, seed=context.seed, round_number=context.round, retry=context.retry)
    return Selection(clients=drawn, memory=context.memory)


def drawn_at_random(
    names: Iterable[str], count: int, *, seed: int, round_number: int, retry: int = 0
) -> tuple[str, ...]:
    """The same of names alone; a count of 0, or more than there are, draws all."""
    turn = f"{round_number}.{retry}" if retry else str(round_number)
    drawn = sorted(names, key=lambda name: (_draw(seed, turn, name), name))
    return tuple(drawn[:count] if count else drawn)


def without_replacement(weights: Mapping[str, float], count: int, stream: random.Random) -> tuple[str, ...]:
    """A weighted sample: each next one is drawn of the rest with a probability in proportion to its weight.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006: the largest keys u^(1/w) win,
    here as the smallest exponential variates of rate w, which is the same order.

    Args:
        weights: 0 or more, finite; those of 0 come last, by their names.
        count: how many are drawn; as many as there are at most.
        stream: a number is drawn for each name, in the order of the names.
    """
    keys = {}
    for name, weight in sorted(weights.items()):
        waits = stream.expovariate(1.0)
        keys[name] = waits / weight if weight > 0 else math.inf
    return tuple(sorted(keys, key=lambda name: (keys[name], name))[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which clients take part in a round.

    Attributes:
        select: the clients of a round, and what is remembered from then on. It is called in the server's loop, and
            takes a few milliseconds for a thousand clients.
        needs_evaluations: `select` goes by how clients evaluate the model that they are to be given, so that a run must
            have them evaluate after every round.
    """

    select: Callable[[SelectionContext], Selection] = at_random
    needs_evaluations: bool = False


def _draw(seed: int, turn: str, client_id: str) -> bytes:
    return hashlib.sha256(f"selection/{seed}/{turn}/{client_id}".encode()).digest()
