"""The expected form of a submodel's update, and its size in bytes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from subfleet.arrays.codecs import Floats, count_encoded_bytes, decode_change
from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.update_codecs import AnyUpdateCodec

_FLOAT_BYTES = 4


@lru_cache(maxsize=64)  # searches ask for it with every candidate
def list_frozen(network: Network) -> frozenset[str]:
    """Names of the tensors that training never changes."""
    return frozenset(name for name, decl in network.tensors.items() if decl.frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateForm:
    """The expected form of an update.

    Attributes:
        shapes: shapes of the tensors in the update by name.
        exact: names of the tensors that are not weights and are sent without the codec.
        codec: the codec of all others.
    """

    shapes: Mapping[str, tuple[int, ...]]
    exact: frozenset[str]
    codec: AnyUpdateCodec

    @classmethod
    def of(
        cls, network: Network, architecture: Architecture, codec: AnyUpdateCodec, sent: Collection[str] = ()
    ) -> "UpdateForm":
        """The form of a submodel's update, or of the tensors in `sent` only. Frozen tensors are not in it.

        Raises:
            ConfigError: the architecture is not a submodel of the network.
        """
        shapes = {
            name: shape
            for name, shape in network.shapes(architecture).items()
            if (not sent or name in sent) and not network.tensors[name].frozen
        }
        exact = frozenset(name for name in shapes if network.tensors[name].role in BUFFER_ROLES)
        return cls(shapes=shapes, exact=exact, codec=codec)

    @property
    def size_bytes(self) -> int:
        """Size of all tensors, without the container's header; the same for every update of this form."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        return sum(
            size * _FLOAT_BYTES if name in self.exact else count_encoded_bytes(self.codec, size)
            for name, size in sizes.items()
        )

    def decode(self, name: str, array: npt.NDArray[np.generic]) -> Floats:
        """Decode the change of a tensor.

        Raises:
            ProtocolError: the submodel has no such tensor, or the array does not match the codec.
        """
        if name not in self.shapes:
            raise ProtocolError(f"the update names the tensor {name!r:.80}, which its submodel lacks")
        return decode_change(self.codec, name, array, self.shapes[name], exact=name in self.exact)


def update_bytes(
    network: Network, architecture: Architecture, codec: AnyUpdateCodec, sent: Collection[str] = ()
) -> int:
    """Size of the update of a submodel, or of some of its tensors, with a codec, without the container's header.

    Raises:
        ConfigError: the architecture is not a submodel of the network.
    """
    return UpdateForm.of(network, architecture, codec, sent).size_bytes
