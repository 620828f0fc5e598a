"""What submodels cost: exactly, except for memory, which is estimated from shapes or from the exporter's numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Network
from subfleet.elastic.update_form import update_bytes
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed
from subfleet.search.candidates import Candidate

__all__ = ["Estimates", "MemoryOf", "estimated_memory", "planned_memory"]

_FLOAT_BYTES = 4

MemoryOf = Callable[[Architecture], Mapping[str, int]]
"""A submodel to its memory in training, in bytes, by program target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """A `CostEstimates`: told anew each time, in about a hundred microseconds.

    Attributes:
        network: the declaration of the whole model.
        costs: of its submodels.
        codec: that updates are estimated by.
        memory: of a submodel.
    """

    network: Network
    costs: Costs
    codec: AnyUpdateCodec
    memory: MemoryOf

    def __call__(self, architecture: Architecture) -> Candidate:
        """What a submodel costs.

        Raises:
            ConfigError: the architecture is no submodel of the network.
        """
        self.network.check(architecture)
        ((parameters, forward_macs),) = self.costs.of([architecture])
        weight_bytes, codec = _FLOAT_BYTES * parameters, self.codec
        return Candidate(
            architecture=architecture,
            parameters=parameters,
            forward_macs=forward_macs,
            weight_bytes=weight_bytes,
            update_bytes=weight_bytes if codec == Uncompressed() else update_bytes(self.network, architecture, codec),
            training_memory_bytes=self.memory(architecture),
        )


def estimated_memory(
    network: Network, overhead_bytes: Mapping[str, int], *, batch_size: int, recompute: bool
) -> MemoryOf:
    """Memory as it follows from shapes alone: below the exported program's own plan.

    Args:
        network: the declaration.
        overhead_bytes: what a runtime takes whatever it runs, by target: these are estimated.
        batch_size: of the program, in samples.
        recompute: whether blocks are computed twice: how little is kept then only the program knows.
    """

    def memory_of(architecture: Architecture) -> Mapping[str, int]:
        cost = estimate_cost(network, architecture, batch_size=batch_size)
        least_bytes = 2 * cost.weight_bytes if recompute else cost.training_memory_bytes
        return {target: least_bytes + more_bytes for target, more_bytes in overhead_bytes.items()}

    return memory_of


def planned_memory(network: Network, target: str, estimates: MemoryEstimates | None) -> MemoryOf:
    """Memory nearly as programs are planned; without estimates, nothing can be trained on the target."""
    if estimates is None:
        return lambda architecture: MappingProxyType({})
    return lambda architecture: MappingProxyType({target: estimates.memory_bytes(network, [architecture])[0]})
