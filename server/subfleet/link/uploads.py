"""The updates that devices have offered and that are on their way: one for each task, none once it is over."""

from collections.abc import Callable

from subfleet.protocol.messages import Update
from subfleet.transport.exchange import BlobExchange, Fetched, FetchFailed

__all__ = ["Uploads"]


class Uploads:
    """What is being pulled. It belongs to the server's one thread.

    A client has one open task, and an update may not be much larger than the weights of its task; so this bounds what a
    client can make the server write before it is checked, however often it changes its mind.

    Args:
        exchange: pulls the blobs.
        complain: is told of a client what went wrong with its update.
    """

    def __init__(self, exchange: BlobExchange, complain: Callable[[str, str], None]) -> None:
        self._exchange = exchange
        self._complain = complain
        self._offers: dict[str, Update] = {}

    @property
    def digests(self) -> frozenset[str]:
        """Of the blobs that are on their way."""
        return frozenset(update.blob.sha256 for update in self._offers.values())

    def pull(self, update: Update) -> None:
        """Begin to pull an update, in place of whatever its task was offered before."""
        older = self._offers.get(update.task_id)
        if older is not None and older.blob != update.blob:
            self.drop(update.task_id)
        self._offers[update.task_id] = update
        self._exchange.fetch(update.client_id, update.blob)

    def drop(self, task_id: str) -> None:
        """Nobody waits for a task's update any more: what has come of it is deleted."""
        offer = self._offers.pop(task_id, None)
        if offer is not None:
            self._exchange.cancel(offer.blob, peer=offer.client_id)

    def ended(self, result: Fetched | FetchFailed) -> tuple[Update, ...]:
        """The updates that a transfer has brought; none where it failed, as the client offers its update again."""
        offers = [one for one in self._offers.values() if one.client_id == result.peer and one.blob == result.ref]
        for update in offers:
            del self._offers[update.task_id]
            if isinstance(result, FetchFailed):
                self._complain(update.client_id, f"its update cannot be fetched: {result.detail}")
        return tuple(offers) if isinstance(result, Fetched) else ()
