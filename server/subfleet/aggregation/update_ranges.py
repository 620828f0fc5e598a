"""The largest change of each tensor of stored updates, from which the grid of a round's sums follows."""

from collections import OrderedDict
from collections.abc import Mapping

from subfleet.aggregation.updates import measure_largest
from subfleet.elastic.update_form import UpdateForm
from subfleet.protocol.blobs import BlobRef
from subfleet.transport.blob_store import BlobStore


class UpdateRanges:
    """Knows them from the check of an update. What it does not know, as after a restart, it reads again.

    Args:
        most: number of updates that it remembers.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._largest: OrderedDict[str, tuple[float, ...]] = OrderedDict()

    def note(self, sha256: str, largest: Mapping[str, float]) -> None:
        """Remember the largest changes of an update's tensors, in the order of its form."""
        self._largest[sha256] = tuple(largest.values())
        if len(self._largest) > self._most:
            self._largest.popitem(last=False)

    def find(self, form: UpdateForm, blobs: BlobStore, ref: BlobRef) -> Mapping[str, float]:
        """The largest absolute change of each tensor of an update.

        Raises:
            FileError: it cannot be read.
            ProtocolError: it is no container, or has not this form.
        """
        known = self._largest.get(ref.sha256)
        if known is None or len(known) != len(form.shapes):
            return measure_largest(form, blobs.path(ref))
        return dict(zip(form.shapes, known, strict=True))
