"""What the update of a submodel must be, and how many bytes it takes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subfleet.arrays.codecs import Floats, count_encoded_bytes, decode_change
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.update_codecs import AnyUpdateCodec

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateForm:
    """What an update must be.

    Attributes:
        shapes: of the tensors whose change it holds.
        exact: those of them that are no weights: no codec writes their change.
        codec: that writes the others.
    """

    shapes: Mapping[str, tuple[int, ...]]
    exact: frozenset[str]
    codec: AnyUpdateCodec

    @classmethod
    def of(
        cls, network: Network, architecture: Architecture, codec: AnyUpdateCodec, sent: Collection[str] = ()
    ) -> "UpdateForm":
        """The update of a submodel; with names of tensors, of those alone.

        Raises:
            ConfigError: the architecture is not a submodel of the network.
        """
        shapes = {name: shape for name, shape in network.shapes(architecture).items() if not sent or name in sent}
        exact = frozenset(name for name in shapes if network.tensors[name].role in BUFFER_ROLES)
        return cls(shapes=shapes, exact=exact, codec=codec)

    @property
    def size_bytes(self) -> int:
        """Of all its tensors, without the container's header; the same for every such update."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        return sum(
            size * _FLOAT_BYTES if name in self.exact else count_encoded_bytes(self.codec, size)
            for name, size in sizes.items()
        )

    def decode(self, name: str, array: npt.NDArray[np.generic]) -> Floats:
        """The change of a tensor.

        Raises:
            ProtocolError: there is no such tensor, or the array is not what the codec writes.
        """
        if name not in self.shapes:
            raise ProtocolError(f"the update names the tensor {name!r:.80}, which its submodel lacks")
        return decode_change(self.codec, name, array, self.shapes[name], exact=name in self.exact)


def update_bytes(
    network: Network, architecture: Architecture, codec: AnyUpdateCodec, sent: Collection[str] = ()
) -> int:
    """What an update of a submodel, or of some of its tensors, takes with a codec, without the container's header.

    Raises:
        ConfigError: the architecture is not a submodel of the network.
    """
    return UpdateForm.of(network, architecture, codec, sent).size_bytes
