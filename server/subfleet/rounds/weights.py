"""The weights of updates: bounded by the client's profile, and by a fraction of the round. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from subfleet.protocol.messages import Update
from subfleet.protocol.task import Calibrate, Train
from subfleet.rounds.state import ClientState

_TIMES, _MOST = 3.0, 0.5
"""A client's largest fraction of a round: this multiple of an equal fraction, and this maximum."""

Weigh = Callable[[Update], float]
"""The weight that a method gives an update, above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """How much an update counts in its round.

    Attributes:
        counted: its weight in the mean.
        share: its fraction of the weights of all updates of the round, 0 to 1.
        lowered: why it counts less than the client claims; empty if it counts in full.
    """

    counted: float
    share: float
    lowered: str = ""


def limit_client_fraction(configured: float | None, count: int) -> float:
    """The largest fraction of a round that one client may have, above 0 and at most 1.

    Args:
        configured: `Run.max_client_fraction`; None is three times an equal fraction, and half of the round at most.
        count: number of updates of the round.
    """
    return min(_MOST, _TIMES / max(count, 1)) if configured is None else configured


def weigh_round(
    weigh: Weigh, clients: Sequence[ClientState], max_client_fraction: float | None
) -> Mapping[str, Weight]:
    """The weights of the updates of a round, by client.

    A client cannot choose its own weight: an update counts no more samples than the client's profile had before the
    round, and since that is a claim too, no update has more than a fraction of the round. Before that, a weight is
    multiplied by the client state's scale, as the change is.

    Args:
        weigh: the method's weight of an update.
        clients: the clients with the updates that are aggregated.
        max_client_fraction: see `limit_client_fraction`; `find_fraction_limit` describes its effect.
    """
    share = limit_client_fraction(max_client_fraction, len(clients))
    known = {client.client_id: _bound(client) for client in clients}
    weights = {client.client_id: client.scale * weigh(known[client.client_id][0]) for client in clients}
    limit = find_fraction_limit(weights.values(), share)
    most = math.inf if limit is None else float(limit)
    total = math.fsum(min(weight, most) for weight in weights.values())
    counted = {}
    for client in clients:
        weight = weights[client.client_id]
        scaled = f"scaled by {client.scale:.3g}, as {client.outlier}" if client.scale < 1 else ""
        capped = f"its share is capped at {share:g} of the round" if weight > most else ""
        counted[client.client_id] = Weight(
            counted=min(weight, most),
            share=min(weight, most) / total if total else 0.0,
            lowered="; ".join(why for why in (known[client.client_id][1], scaled, capped) if why),
        )
    return counted


def find_fraction_limit(weights: Iterable[float], max_fraction: float) -> Fraction | None:
    """The limit that the heaviest weights of a round are lowered to, so that none exceeds a fraction of their sum.

    With the k heaviest at the limit c and the others adding up to R, the sum is k c + R, and c has its fraction of that
    if c = max_fraction R / (1 - k max_fraction). The smallest k counts for which no other weight exceeds c. The
    arithmetic is exact and independent of the order of the weights.

    Args:
        weights: the weights of all updates of the round, finite; weights of 0 do not count.
        max_fraction: above 0 and at most 1, read as the decimal number that it is written as. If even equal weights
            exceed it, all are lowered to the smallest.

    Returns:
        None if no weight exceeds the fraction.
    """
    share = Fraction(str(max_fraction))
    ordered = sorted((Fraction(weight) for weight in weights if weight > 0), reverse=True)
    if len(ordered) * share <= 1:
        return ordered[-1] if ordered and ordered[0] > ordered[-1] else None
    rest = sum(ordered, Fraction())
    for lowered, heaviest in enumerate(ordered):
        limit = share * rest / (1 - share * lowered)
        if heaviest <= limit:
            return limit if lowered else None
        rest -= heaviest
    raise AssertionError("one of several weights is below its fraction")


def count_samples(client: ClientState) -> int:
    """The samples that an update counts as trained on; 0 without an update."""
    return 0 if client.update is None else _bound(client)[0].sample_count


def _bound(client: ClientState) -> tuple[Update, str]:
    """A client's update, limited to the samples that its profile allows in a round, and the reason if it was."""
    if client.update is None:
        raise ValueError(f"client {client.client_id} has no update")
    claimed, known = client.update.sample_count, client.offer.sample_count
    if client.task is not None and isinstance(client.task.work, Train | Calibrate):
        known = client.task.work.settings.round_count(client.offer.sample_count)
    if claimed <= known:
        return client.update, ""
    of_round = "" if known == client.offer.sample_count else f" and a round uses {known} of them"
    why = f"it claims {claimed} samples, but its profile has {client.offer.sample_count}{of_round}"
    examples = tuple(
        (choice, tuple((operator, count * known // claimed) for operator, count in counts))
        for choice, counts in client.update.operator_examples
    )
    return replace(client.update, sample_count=known, operator_examples=examples), why
