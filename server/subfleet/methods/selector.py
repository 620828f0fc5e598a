"""The selector of a method: which clients take part in a round. By default they are drawn at random."""

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.elastic.network import Network
from subfleet.methods.assigner import open_stream
from subfleet.protocol.answers import Evaluated
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture

__all__ = [
    "AvailableClient",
    "LastUpdate",
    "Selection",
    "SelectionContext",
    "Selector",
    "draw_without_replacement",
    "select_at_random",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastUpdate:
    """A client's last aggregated update. Its claims are bounded by what else is known about the client.

    Attributes:
        round: its round.
        size: what the client trained.
        architecture: the same, as placed in the model.
        sample_count: samples that it trained on, at most as many as its profile reported.
        epochs: passes over them.
        loss: mean over the labels of the last epoch, each before its step.
        square_loss: mean of the squares of the same; at least the square of the mean.
        change_norm: L2 norm of the change of all its weights.
        train_s: seconds of the training steps, as the client reported.
        took_s: seconds from sending the task until the update was stored, by the server's clock. Too few under a
            logical clock, and for a task that an earlier process of the server sent.
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
class AvailableClient:
    """A client that can take part now.

    Attributes:
        sample_count: of its data, as its profile reported.
        class_counts: samples of each of the run's classes.
        budget: what it can give now.
        expected_training_s: estimated seconds to train its last size, else the smallest; 0 if its speed is unknown.
        expected_downlink_s: estimated seconds to receive the weights; 0 if its link is unknown.
        expected_uplink_s: estimated seconds to send the update; 0 if its link is unknown.
        past: None before its first aggregated update.
        evaluation: its last evaluation of the model on its held-out data; None before the first.
    """

    client_id: str
    sample_count: int
    class_counts: tuple[int, ...] = ()
    budget: Budget
    expected_training_s: float = 0.0
    expected_downlink_s: float = 0.0
    expected_uplink_s: float = 0.0
    past: LastUpdate | None = None
    evaluation: Evaluated | None = None

    @property
    def expected_s(self) -> float:
        """Estimated seconds that a round takes it."""
        return self.expected_downlink_s + self.expected_training_s + self.expected_uplink_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionContext:
    """A round that selects its clients.

    Attributes:
        clients: the available ones, in the order of their ids; one or more.
        count: how many to select, as configured; 0 selects all.
        round: its number.
        attempt: earlier attempts of the round that aggregated nothing; another attempt may select other clients.
        seed: of the run.
        memory: what the method remembers.
        networks: the networks in use, by id.
    """

    clients: tuple[AvailableClient, ...]
    count: int
    round: int
    attempt: int = 0
    seed: int = 0
    memory: Any = None
    networks: Mapping[str, Network] = field(default_factory=lambda: MappingProxyType({}))

    def stream(self, purpose: str) -> random.Random:
        """Random numbers for one purpose in one attempt of the round."""
        return open_stream(f"{self.seed}/{self.round}.{self.attempt}/{purpose}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The clients of a round.

    Attributes:
        clients: their ids, in any order; one or more of the available ones.
        memory: what the method remembers from now on.
    """

    clients: tuple[str, ...]
    memory: Any = None


def select_at_random(context: SelectionContext) -> Selection:
    """Select a uniform random sample of the clients (McMahan et al. 2017, algorithm 1).

    Each client draws a number from the seed, the round and its own id, and the lowest ones are selected. So the order
    of clients does not matter, and a client that comes or goes does not change the number of another.
    """
    names = (client.client_id for client in context.clients)
    drawn = draw_at_random(names, context.count, seed=context.seed, round_number=context.round, attempt=context.attempt)
    return Selection(clients=drawn, memory=context.memory)


def draw_at_random(
    names: Iterable[str], count: int, *, seed: int, round_number: int, attempt: int = 0
) -> tuple[str, ...]:
    """The same for names alone; a count of 0, or more than there are, draws all."""
    key = f"selection/{seed}/{round_number}.{attempt}" if attempt else f"selection/{seed}/{round_number}"
    drawn = sorted(names, key=lambda name: (hashlib.sha256(f"{key}/{name}".encode()).digest(), name))
    return tuple(drawn[:count] if count else drawn)


def draw_without_replacement(weights: Mapping[str, float], count: int, stream: random.Random) -> tuple[str, ...]:
    """Draw a weighted sample: each next name with a probability in proportion to its weight among the rest.

    Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006: the largest keys u^(1/w) win, here as
    the smallest exponential variates of rate w, which is the same order.

    Args:
        weights: 0 or more, finite; names of weight 0 come last, in alphabetical order.
        count: names to draw; more than there are draws all.
        stream: a number is drawn for each name, in alphabetical order.
    """
    keys = {}
    for name, weight in sorted(weights.items()):
        variate = stream.expovariate(1.0)
        keys[name] = variate / weight if weight > 0 else math.inf
    return tuple(sorted(keys, key=lambda name: (keys[name], name))[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which clients take part in a round.

    Attributes:
        select: the clients of a round, and the memory from then on. It runs in the server's loop and takes a few
            milliseconds for a thousand clients.
        needs_evaluations: `select` uses the clients' evaluations of the model, so the run must have them evaluate after
            every round.
    """

    select: Callable[[SelectionContext], Selection] = select_at_random
    needs_evaluations: bool = False
