"""The weights that candidates are scored with: drawn alike in every run, whatever was learned."""

from subfleet.elastic.building import build_module
from subfleet.elastic.network import Network
from subfleet.folding.updates import subnet_weights
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.subnet import SubnetSpec
from subfleet.transport.blob_store import BlobStore

__all__ = ["ScoringWeights"]


class ScoringWeights:
    """Cut once for each size. No layer is at 0, which would hide the gradients of the layers before it.

    Args:
        blobs: where they are served from.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._known: dict[str, BlobRef] = {}

    @property
    def digests(self) -> set[str]:
        """Of all of them."""
        return {blob.sha256 for blob in self._known.values()}

    def of(self, network: Network, size: SubnetSpec) -> BlobRef:
        """The weights of a size of a network."""
        if size.spec_id not in self._known:
            first = build_module(network, network.full_spec()).state_dict()
            self._known[size.spec_id] = self._blobs.add(subnet_weights(network, size, first))
        return self._known[size.spec_id]
