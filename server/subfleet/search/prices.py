"""What subnets cost: exactly, but for memory, which is told from their shapes or by numbers that the exporter gave."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.elastic.network import Network
from subfleet.elastic.update_form import update_bytes
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed
from subfleet.search.candidates import Candidate
from subfleet.search.fitting import INFINITE_BYTES

__all__ = ["MemoryOf", "Prices", "estimated_memory", "planned_memory"]

_FLOAT_BYTES = 4

MemoryOf = Callable[[SubnetSpec], Mapping[str, int]]
"""A subnet to its memory in training, in bytes, by program target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A `PriceList`: told anew each time, in about a hundred microseconds.

    Attributes:
        network: the declaration of the whole model.
        costs: of its subnets.
        codec: that updates are priced by.
        memory: of a subnet.
    """

    network: Network
    costs: Costs
    codec: AnyUpdateCodec
    memory: MemoryOf

    def __call__(self, spec: SubnetSpec) -> Candidate:
        """What a subnet costs.

        Raises:
            ConfigError: the spec is no subnet of the network.
        """
        self.network.check(spec)
        ((parameters, forward_macs),) = self.costs.of([spec])
        weight_bytes, codec = _FLOAT_BYTES * parameters, self.codec
        return Candidate(
            spec=spec,
            parameters=parameters,
            forward_macs=forward_macs,
            weight_bytes=weight_bytes,
            update_bytes=weight_bytes if codec == Uncompressed() else update_bytes(self.network, spec, codec),
            training_memory_bytes=self.memory(spec),
        )


def estimated_memory(
    network: Network, overhead_bytes: Mapping[str, int], *, batch_size: int, recompute: bool
) -> MemoryOf:
    """Memory as it follows from shapes alone: below the exported program's own plan.

    Args:
        network: the declaration.
        overhead_bytes: what a runtime takes whatever it runs, by target: these are priced.
        batch_size: of the program, in samples.
        recompute: whether blocks are computed twice: how little is kept then only the program knows.
    """

    def memory_of(spec: SubnetSpec) -> Mapping[str, int]:
        cost = estimate_cost(network, spec, batch_size=batch_size)
        least_bytes = 2 * cost.weight_bytes if recompute else cost.training_memory_bytes
        return {target: least_bytes + more_bytes for target, more_bytes in overhead_bytes.items()}

    return memory_of


def planned_memory(network: Network, target: str, prices: MemoryPrices | None) -> MemoryOf:
    """Memory nearly as programs are planned; without prices no memory is enough, as nothing can be trained there."""
    if prices is None:
        return lambda spec: MappingProxyType({target: INFINITE_BYTES})
    return lambda spec: MappingProxyType({target: prices.memory_bytes(network, [spec])[0]})
