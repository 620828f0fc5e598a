"""The costs of submodels: exact, except for memory, which is estimated from shapes or a model of the planner."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Network
from subfleet.elastic.update_form import list_frozen, update_bytes
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed
from subfleet.search.candidates import Candidate

_FLOAT_BYTES = 4

MemoryOf = Callable[[Architecture], Mapping[str, int]]
"""From a submodel, its memory in training by program target, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The costs of a network's submodels, as `CostEstimates`; about a hundred microseconds for each.

    Attributes:
        network: the declaration of the whole model.
        costs: of its submodels, except memory.
        codec: with which updates are estimated.
        memory: of a submodel.
    """

    network: Network
    costs: Costs
    codec: AnyUpdateCodec
    memory: MemoryOf

    def __call__(self, architecture: Architecture) -> Candidate:
        """The costs of a submodel.

        Raises:
            ConfigError: the architecture is no submodel of the network.
        """
        self.network.check(architecture)
        ((parameters, forward_macs),) = self.costs.of([architecture])
        weight_bytes, codec = _FLOAT_BYTES * parameters, self.codec
        if list_frozen(self.network):  # a device fetches these once
            weight_bytes = update_bytes(self.network, architecture, Uncompressed())
        return Candidate(
            architecture=architecture,
            parameters=parameters,
            forward_macs=forward_macs,
            weight_bytes=weight_bytes,
            update_bytes=weight_bytes if codec == Uncompressed() else update_bytes(self.network, architecture, codec),
            training_memory_bytes=self.memory(architecture),
        )


def estimate_by_shapes(
    network: Network, overhead_bytes: Mapping[str, int], *, batch_size: int, recompute: bool
) -> MemoryOf:
    """Memory estimated from shapes alone, which is less than the exported program's own plan.

    Args:
        network: the declaration.
        overhead_bytes: by target, the fixed memory of its runtime; memory is estimated for these targets.
        batch_size: of the program, in samples.
        recompute: whether blocks are computed twice; how much is kept then, only the program shows.
    """

    def estimate_memory(architecture: Architecture) -> Mapping[str, int]:
        cost = estimate_cost(network, architecture, batch_size=batch_size)
        least_bytes = 2 * cost.weight_bytes if recompute else cost.training_memory_bytes
        return {target: least_bytes + more_bytes for target, more_bytes in overhead_bytes.items()}

    return estimate_memory


def estimate_by_plans(network: Network, target: str, estimates: MemoryEstimates | None) -> MemoryOf:
    """Memory estimated by a model of the planner; without one, nothing can be trained on the target."""
    if estimates is None:
        return lambda architecture: MappingProxyType({})
    return lambda architecture: MappingProxyType({target: estimates.memory_bytes(network, [architecture])[0]})
