"""Which limit decided what a client was given, for those who read a run's tables. Pure."""

from subfleet.methods.assigner import AssignmentContext
from subfleet.search.candidates import Candidate
from subfleet.search.fitting import LIMITS

__all__ = ["BY_METHOD", "deciding_limit"]

BY_METHOD = "method"
"""A larger size would have fitted, and the method gave another."""


def deciding_limit(ask: AssignmentContext, given: Candidate | None, only: Candidate | None = None) -> str:
    """What keeps a client from more than it was given.

    A limit decides where a larger size is excluded by it alone. Where every larger size exceeds several limits, these
    decide together.

    Args:
        ask: what the method was asked for the client.
        given: what it gave; None where nothing fits.
        only: where nothing was given, the one size that might have been.

    Returns:
        Names of limits with "+" between them, "method", or nothing where the largest size was given.
    """
    if given is None and only is not None:
        return "+".join(limit for limit in LIMITS if limit in ask.exceeded(only))
    larger = [ask.exceeded(one) for one in ask.candidates if given is None or one.order > given.order]
    if not all(larger):
        return BY_METHOD
    alone = frozenset[str]().union(*(limits for limits in larger if len(limits) == 1))
    decides = alone or frozenset[str]().union(*larger)
    return "+".join(limit for limit in LIMITS if limit in decides)
