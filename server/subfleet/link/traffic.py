"""Counts the payload bytes of each client in the open round."""

from collections import Counter
from collections.abc import Mapping

from subfleet.rounds.ongoing import list_ongoing
from subfleet.rounds.progress import Searching
from subfleet.rounds.state import RunState
from subfleet.transport.counting import Direction

MOST_CLIENTS = 2**16
"""Clients that are counted in one round; further ones are not, so that invented names take no memory."""


class Traffic:
    """Counts the payload bytes to and from each client."""

    def __init__(self) -> None:
        self._down = Counter[str]()
        self._up = Counter[str]()

    def count(self, client_id: str, direction: Direction, size_bytes: int) -> None:
        """Count the bytes of one payload, as the server has sent or received it."""
        account = self._down if direction == "sent" else self._up
        if client_id in account or len(account) < MOST_CLIENTS:
            account[client_id] += size_bytes

    def of(self, client_id: str) -> tuple[int, int]:
        """Bytes down and bytes up of a client."""
        return self._down[client_id], self._up[client_id]

    def follow(self, before: RunState, after: RunState) -> None:
        """Restart the counts if a step begins or ends an attempt of a round, an evaluation or the deployment.

        Those of clients that go on from one asynchronous round to the next count in the round in which they are done.
        """
        if (after.run_attempt, _name_account(after)) != (before.run_attempt, _name_account(before)):
            kept = list_ongoing(before).keys() & after.clients.keys() if after.phase in ("train", "aggregate") else ()
            self.restart({name: self.of(name) for name in kept})

    def restart(self, counted: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Begin a round, or continue one with the bytes counted before."""
        moved = counted or {}
        self._down = Counter({client_id: down for client_id, (down, _) in moved.items()})
        self._up = Counter({client_id: up for client_id, (_, up) in moved.items()})


def _name_account(state: RunState) -> str:
    """A name for the phases that are counted apart from the round; in a search, for each generation."""
    if isinstance(state.at, Searching):
        return f"search {state.at.generations}"
    return state.phase if state.phase in ("evaluate", "deploy") else ""
