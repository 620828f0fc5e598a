"""Which clients take part in a round, where not all of them do."""

import hashlib
from collections.abc import Iterable

__all__ = ["NOT_DRAWN", "selected"]

NOT_DRAWN = "it was not drawn for this round"
"""Why a client that could take part is skipped."""


def selected(clients: Iterable[str], count: int, *, seed: int, round_number: int, retry: int = 0) -> tuple[str, ...]:
    """A sample of the clients without replacement, every one equally likely (McMahan et al. 2017, algorithm 1).

    Each client draws a number that follows from the seed, the round and its own id, and the lowest win. So the choice
    depends on no order, and a client that comes or goes changes no other's number.

    Args:
        clients: ids of those that could take part, in any order.
        count: how many are wanted; 0, or more than there are, takes all of them.
        seed: of the run.
        round_number: of the round.
        retry: how often this round was tried before: others may be drawn then.

    Returns:
        Their ids, sorted.

    Raises:
        ValueError: the count is below 0.
    """
    if count < 0:
        raise ValueError(f"count is {count}, but must be 0 for all clients, or above 0")
    turn = f"{round_number}.{retry}" if retry else str(round_number)
    drawn = sorted(set(clients), key=lambda name: (_draw(seed, turn, name), name))
    return tuple(sorted(drawn[:count] if count else drawn))


def _draw(seed: int, turn: str, client_id: str) -> bytes:
    return hashlib.sha256(f"selection/{seed}/{turn}/{client_id}".encode()).digest()
