"""The disk of an emulated device: which blobs it holds, without files of its own."""

import sys
from collections.abc import Iterable, Set

from subfleet.agent.actions import Weigh
from subfleet.agent.events import Weighed
from subfleet.edge_client.store import STATE_BYTES
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.disk import needed_bytes


class EmulatedDisk:
    """Keeps blobs as `BlobStore` does: the least recently used ones that are not pinned make room for others.

    Args:
        limit_bytes: space for blobs; None means no limit.
        held_bytes: digest and size of each blob that is there, the least recently used one first.
    """

    def __init__(self, limit_bytes: int | None, held_bytes: Iterable[tuple[str, int]] = ()) -> None:
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self._sizes_bytes = dict(held_bytes)

    @property
    def held_bytes(self) -> tuple[tuple[str, int], ...]:
        """Digest and size of each blob, the least recently used one first."""
        return tuple(self._sizes_bytes.items())

    def weigh(self, action: Weigh) -> Weighed:
        """The space that a task takes; if it fits, room is made for it."""
        task = action.task
        lacking = frozenset(blob.sha256 for blob in task.blobs if blob.sha256 not in self._sizes_bytes)
        room_bytes, required_bytes = self._measure_room(action.pinned), needed_bytes(task, lacking)
        if required_bytes <= room_bytes:
            self._make_room(required_bytes, action.pinned)
        return Weighed(task_id=task.task_id, lacking=lacking, room_bytes=room_bytes)

    def measure_budget(self, pinned: Set[str]) -> int | None:
        """The space for a task in bytes, beside pinned blobs; None without a limit."""
        return None if self._limit_bytes == sys.maxsize else max(0, self._measure_room(pinned) - STATE_BYTES)

    def holds(self, blob: BlobRef) -> bool:
        """Whether a blob is there."""
        return blob.sha256 in self._sizes_bytes

    def hold(self, blob: BlobRef) -> bool:
        """Use a blob; returns whether it had to be fetched."""
        known = self._sizes_bytes.pop(blob.sha256, None)
        self._sizes_bytes[blob.sha256] = blob.size_bytes
        return known is None

    def prune(self, keep: Set[str]) -> None:
        """Remove all blobs but these digests."""
        self._sizes_bytes = {digest: size for digest, size in self._sizes_bytes.items() if digest in keep}

    def _measure_room(self, pinned: Set[str]) -> int:
        held_bytes = sum(size_bytes for digest, size_bytes in self._sizes_bytes.items() if digest in pinned)
        return max(0, self._limit_bytes - held_bytes)

    def _make_room(self, more_bytes: int, pinned: Set[str]) -> None:
        excess_bytes = sum(self._sizes_bytes.values()) + more_bytes - self._limit_bytes
        for digest in [digest for digest in self._sizes_bytes if digest not in pinned]:
            if excess_bytes <= 0:
                return
            excess_bytes -= self._sizes_bytes.pop(digest)
