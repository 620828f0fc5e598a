"""How much each update counts: bounded by what is known of its client, and by a fraction of the round. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from subfleet.protocol.messages import Update
from subfleet.protocol.task import Calibrate, Train
from subfleet.rounds.state import ClientState

_TIMES, _MOST = 3.0, 0.5
"""How many times an equal fraction of a round one client may have, and at most."""

Weigh = Callable[[Update], float]
"""How much an update counts by itself, above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """How much an update counts in its round.

    Attributes:
        counted: its weight in the mean.
        share: of the weights of all updates of the round, 0 to 1.
        lowered: why it counts less than it claims; empty where it counts in full.
    """

    counted: float
    share: float
    lowered: str = ""


def limit_client_fraction(configured: float | None, count: int) -> float:
    """The fraction of a round that one client may have, above 0 and at most 1.

    Args:
        configured: `Run.max_client_fraction`; None is three times an equal share, and half of the round at most.
        count: updates of the round.
    """
    return min(_MOST, _TIMES / max(count, 1)) if configured is None else configured


def weigh_round(
    weigh: Weigh, clients: Sequence[ClientState], max_client_fraction: float | None
) -> Mapping[str, Weight]:
    """What the updates of a round count, by client.

    A client is no authority on its own weight: an update counts no more samples than the client's profile has told
    before the round, and as that is a claim too, no update has more than a fraction of the round. Before that a
    weight is multiplied by the client state's scale, as the change is.

    Args:
        weigh: what the method gives an update by itself.
        clients: whose updates are aggregated, with their results.
        max_client_fraction: see `limit_client_fraction`, and for what it does `find_fraction_limit`.
    """
    share = limit_client_fraction(max_client_fraction, len(clients))
    known = {client.client_id: _bound(client) for client in clients}
    weights = {client.client_id: client.scale * weigh(known[client.client_id][0]) for client in clients}
    limit = find_fraction_limit(weights.values(), share)
    most = math.inf if limit is None else float(limit)
    total = math.fsum(min(weight, most) for weight in weights.values())
    found = {}
    for client in clients:
        weight = weights[client.client_id]
        scaled = f"scaled by {client.scale:.3g}, as {client.outlier}" if client.scale < 1 else ""
        capped = f"its share is capped at {share:g} of the round" if weight > most else ""
        found[client.client_id] = Weight(
            counted=min(weight, most),
            share=min(weight, most) / total if total else 0.0,
            lowered="; ".join(why for why in (known[client.client_id][1], scaled, capped) if why),
        )
    return found


def find_fraction_limit(weights: Iterable[float], max_fraction: float) -> Fraction | None:
    """The value to which the heaviest weights of a round are lowered, so that none exceeds a fraction of them all.

    With the k heaviest at the limit c, and the others adding up to R, they are k c + R together, and c is its share of
    that where c = max_fraction R / (1 - k max_fraction). Of the k for which no other weight exceeds c, the smallest is
    the one. The arithmetic is exact and goes by the weights' order of size alone.

    Args:
        weights: of all updates of the round, finite; those of 0 count for nothing.
        max_fraction: above 0 and at most 1, taken for the decimal number that it is written as. Where even equal
            weights exceed it, all are lowered to the smallest.

    Returns:
        None where no weight exceeds the share.
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
    raise AssertionError("one of several weights is below its share")


def count_samples(client: ClientState) -> int:
    """Samples that an update counts as trained on; 0 where there is none."""
    return 0 if client.update is None else _bound(client)[0].sample_count


def _bound(client: ClientState) -> tuple[Update, str]:
    """A client's update with no more samples than a round of its profile's has, and what was wrong with it."""
    if client.update is None:
        raise ValueError(f"the client state of client {client.client_id} has no update")
    claimed, known = client.update.sample_count, client.offer.sample_count
    if client.task is not None and isinstance(client.task.work, Train | Calibrate):
        known = client.task.work.settings.round_count(client.offer.sample_count)
    if claimed <= known:
        return client.update, ""
    of_round = "" if known == client.offer.sample_count else f", of which a round goes over {known}"
    why = f"it claims {claimed} samples, but its profile has {client.offer.sample_count}{of_round}"
    examples = tuple(
        (choice, tuple((operator, count * known // claimed) for operator, count in counts))
        for choice, counts in client.update.operator_examples
    )
    return replace(client.update, sample_count=known, operator_examples=examples), why
