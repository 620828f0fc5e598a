"""How long a client's part of a round is expected to take, by what is known before it begins. Pure."""

from dataclasses import dataclass

from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.state import Seat
from subfleet.rounds.terms import Terms
from subfleet.search.candidates import TRAINING_MACS_PER_FORWARD

__all__ = ["ExpectedTime", "expected_time"]

_MOST_S = 1e9
"""Thirty years: whatever a device claims, what is expected of it is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTime:
    """Seconds of a client's part of a round, each 0 where the client does not tell what it follows from.

    Attributes:
        training_s: of its training, by the pace that it has told.
        downlink_s: of the weights on their way to it, by the link that it has told for this round.
        uplink_s: of the update on its way back.
    """

    training_s: float = 0.0
    downlink_s: float = 0.0
    uplink_s: float = 0.0


def expected_time(
    terms: Terms,
    seat: Seat,
    *,
    forward_macs: int,
    training: TrainingSettings,
    weight_bytes: int,
    update_bytes: int,
) -> ExpectedTime:
    """What a client that has answered a round's announcement takes for a training.

    Args:
        terms: of the run.
        seat: of the client.
        forward_macs: multiply-accumulates of one sample's forward pass.
        training: the client's local training.
        weight_bytes: that travel to it; programs, which it keeps, are not counted.
        update_bytes: that travel back.
    """
    training_s = 0.0
    if seat.offer.macs_per_s is not None:
        passes = training.sample_passes(seat.offer.sample_count)
        training_s = min(TRAINING_MACS_PER_FORWARD * forward_macs * passes / seat.offer.macs_per_s, _MOST_S)
    budget = seat.offer.budget
    return ExpectedTime(
        training_s=training_s,
        downlink_s=_link_s(terms, weight_bytes, None if budget is None else budget.downlink_bytes),
        uplink_s=_link_s(terms, update_bytes, None if budget is None else budget.uplink_bytes),
    )


def _link_s(terms: Terms, moved_bytes: int, link_bytes: int | None) -> float:
    """Seconds on a link, by what it moves in `communication_s` seconds."""
    if link_bytes is None:
        return 0.0
    return min(terms.config.communication_s * moved_bytes / max(link_bytes, 1), _MOST_S)
