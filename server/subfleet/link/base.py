"""What the server's loop needs of its devices: their messages and updates, and a way to send them tasks."""

from collections.abc import Callable, Iterator
from typing import Protocol

from subfleet.link.traffic import Traffic
from subfleet.protocol.answers import Update
from subfleet.protocol.messages import Ack, RoundInfo, Task
from subfleet.rounds.signals import Arrival
from subfleet.transport.blob_store import BlobStore


class Link(Protocol):
    """Connects one server to its devices. It belongs to the thread of the loop.

    Attributes:
        traffic: the bytes of each client in the open round.
    """

    traffic: Traffic

    @property
    def digests(self) -> frozenset[str]:
        """Digests of the updates that are on their way."""
        ...

    def open(self) -> None:
        """Connect. Raises TransportError if the devices cannot be reached at all."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...

    def receive(self, timeout_s: float) -> Iterator[Arrival]:
        """The messages of devices to the run: waits up to `timeout_s` seconds for the first, then yields all."""
        ...

    def pull(self, update: Update) -> None:
        """Begin to pull an update's blob; `pull_updates` yields the update when it has arrived."""
        ...

    def pull_updates(self) -> Iterator[Update]:
        """The updates with blobs that have arrived since the last call; a client offers one that failed again."""
        ...

    def ask(self, client_id: str, info: RoundInfo) -> None:
        """Send one client an announcement until its telemetry arrives, or the announcement's deadline is over."""
        ...

    def send_task(self, task: Task) -> None:
        """Send a task until its client acknowledges it."""
        ...

    def withdraw(self, task_id: str) -> None:
        """Stop sending a task, and drop what has arrived of its update."""
        ...

    def reply(self, client_id: str, ack: Ack) -> None:
        """Send an ack, once."""
        ...

    def send(self, info: RoundInfo | None) -> None:
        """Send what is due, and the announcement of the round if there is one."""
        ...


Connect = Callable[[BlobStore], Link]
"""Creates a link, not opened yet, that serves blobs from a store and pulls updates into it."""
