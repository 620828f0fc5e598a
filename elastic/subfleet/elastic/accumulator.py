"""Exact weighted averaging of what submodels learned.

Clients send a change: trained minus received. Each element of the full model moves by the weighted mean of the changes
of the clients that held it. It stays bit-identical if too few held it or the mean is exactly 0. Weighted changes are
rounded to a grid that is fixed before the first update, and summed as integers (`subfleet.elastic.grid`). Every order
and grouping of clients therefore gives the same bits, on the CPU and on a GPU.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import loops_for
from subfleet.elastic.compiled_sums import CompiledBatch
from subfleet.elastic.contributions import Contribution, ContributionReader, Reading
from subfleet.elastic.exact_sums import Move, Term, add_exactly, check_limit, move_tensors
from subfleet.elastic.grid import WeightGrid, limit_exponent
from subfleet.elastic.holders import HolderCounts
from subfleet.elastic.maps import Placement
from subfleet.elastic.network import Network
from subfleet.elastic.sum_layout import Numbers, SumLayout, lay_out
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture


class Accumulator:
    """Sums one round's changes into the memory of one model (int64), however many clients there are.

    It works on the device of the state's tensors and moves updates there, one batch at a time.

    Attributes:
        network: the network.
        state: the full model at the start of the round, or some of its tensors; only these are aggregated. `finish`
            reads it again; it is never written.
        min_contributors: number of clients with a weight above 0 that must hold an element for it to move; FedorAS's
            operator-wise averaging takes 2 (section 3.4, equation 5).

    Args:
        largest: the largest absolute change of a tensor in all contributions, where it is known; sums are the more
            precise then. A larger change is refused.

    Raises:
        ConfigError: the state does not match the network or is not finite, or the total weight is not above 0 and at
            most 2^64. It must be at least the sum of all weights that will be added.
    """

    def __init__(
        self,
        network: Network,
        state: Mapping[str, Tensor],
        *,
        total_weight: float,
        min_contributors: int = 1,
        largest: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if min_contributors < 1:
            raise ConfigError(f"min_contributors is {min_contributors}, but must be 1 or more")
        _check_state(network, state)
        self.network = network
        self.state = {name: state[name].detach() for name in network.tensors if name in state}
        self.min_contributors = min_contributors
        self._grid = WeightGrid(total_weight)
        self._exponents = np.array(
            [limit_exponent(name, tensor, largest.get(name)) for name, tensor in self.state.items()]
        )
        self._units = 0
        self._element_count = 0
        self._layout = lay_out([network.tensors[name] for name in self.state], network.whole_sizes())
        self._block, self._sums = _zero_sums(self.state, self._layout)
        self._holders = HolderCounts(self._layout, min_contributors)
        self._reader = ContributionReader(network, self._layout, self._grid)

    @property
    def total_weight(self) -> float:
        """The announced upper bound of the sum of all weights."""
        return self._grid.total_weight

    def add(
        self,
        architecture: Architecture,
        change: Mapping[str, Tensor],
        weight: float,
        *,
        placements: Sequence[Placement] | None = None,
        factors: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """Add one contribution; see `Contribution` for the arguments and `add_many` for errors."""
        contribution = Contribution(
            architecture=architecture, change=change, weight=weight, placements=placements, factors=factors
        )
        self.add_many([contribution])

    def add_many(self, contributions: Sequence[Contribution]) -> None:
        """Add several contributions in one pass over the sums. On any error nothing is added.

        Raises:
            ConfigError: an architecture is not a submodel of this network, or placements name an unknown tensor or one
                tensor twice.
            ProtocolError: tensors are missing, unexpected, of a wrong shape or type, not finite or far too large; a
                weight or factor is out of range; or the weights exceed the announced total. To find the contribution
                at fault, add them one by one.
        """
        units = self._units + sum(self._grid.units(contribution.weight) for contribution in contributions)
        self._grid.check_total(units)
        readings = [self._reader.read(contribution) for contribution in contributions]
        self._add(readings)
        self._units = units
        for reading in readings:
            self._holders.add(reading.held, reading.units, reading.element_units)

    def merge(self, other: "Accumulator") -> None:
        """Add the sums of another accumulator of the same round, which stays unchanged.

        Raises:
            ConfigError: the network, starting model, total weight or minimum of contributors differ.
            ProtocolError: together they exceed the announced total weight.
        """
        if not self._same_round(other):
            raise ConfigError(
                "two accumulators differ in network, starting model, total weight or minimum of contributors; only "
                "accumulators of one round can be merged"
            )
        units = self._units + other._units  # noqa: SLF001 - of the same class
        self._grid.check_total(units)
        self._units = units
        for name, total in self._sums.items():
            total.add_(other._sums[name])  # noqa: SLF001
        self._holders.merge(other._holders)  # noqa: SLF001

    def finish(self) -> dict[str, Tensor]:
        """Compute the new model. It shares no memory with the old one; more updates may be added afterwards."""
        moves = {
            name: Move(
                old=old.contiguous(),
                total=self._sums[name],
                counts=self._holders.units_and_clients(name),
                min_clients=self.min_contributors,
                scale=self._limit(name),
            )
            for name, old in self.state.items()
        }
        return move_tensors(moves)

    def find_held(self) -> dict[str, Tensor]:
        """Bool masks of the elements that enough clients with a weight above 0 hold, even if their mean change is 0."""
        held = {}
        for name, tensor in self.state.items():
            _, clients = self._holders.units_and_clients(name)
            held[name] = (clients >= self.min_contributors).to(tensor.device).expand(tensor.shape)
        return held

    def _add(self, readings: Sequence[Reading]) -> None:
        """Add the values of all readings to the sums, or none."""
        batch = self._compile(readings)
        terms: dict[str, list[Term]] = {}
        for position, reading in enumerate(readings):
            for name in reading.values if batch is None else batch.list_left(position):
                terms.setdefault(name, []).append(self._make_term(name, reading))
        if batch is not None and not batch.add():
            batch.undo()
            for reading in readings:
                for name, values in reading.values.items():
                    check_limit(name, values, self._limit(name))
        try:
            add_exactly(list(terms.values()))
        except BaseException:
            if batch is not None:
                batch.undo()
            raise

    def _compile(self, readings: Sequence[Reading]) -> CompiledBatch | None:
        """What the compiled loop adds, if that pays off for all that was added so far."""
        self._element_count += sum(tensor.numel() for reading in readings for tensor in reading.values.values())
        loops = loops_for(self._element_count)
        if not readings or loops is None or self._block is None:
            return None
        return CompiledBatch(self._block, self._layout, readings, self._exponents, loops)

    def _limit(self, name: str) -> float:
        return math.ldexp(1.0, int(self._exponents[self._layout.places[name].position]))

    def _make_term(self, name: str, reading: Reading) -> Term:
        position, total = self._layout.places[name].position, self._sums[name]
        exponent = -int(self._exponents[position])
        units = reading.element_units.get(name)
        factor = (
            math.ldexp(int(reading.units[position]), exponent)
            if units is None
            else units.to(total.device, torch.float64) * math.ldexp(1.0, exponent)
        )
        return Term(
            name=name,
            total=total,
            values=reading.values[name].detach().to(total.device),
            factor=factor,
            limit=self._limit(name),
            map=reading.held.maps[name],
        )

    def _same_round(self, other: "Accumulator") -> bool:
        return (
            self.network.config == other.network.config
            and self.total_weight == other.total_weight
            and self.min_contributors == other.min_contributors
            and self.state.keys() == other.state.keys()
            and np.array_equal(self._exponents, other._exponents)  # noqa: SLF001
            and all(torch.equal(tensor, other.state[name]) for name, tensor in self.state.items())
        )


def _check_state(network: Network, state: Mapping[str, Tensor]) -> None:
    declared = {name: decl.shape for name, decl in network.tensors.items()}
    wrong = sorted(name for name, tensor in state.items() if declared.get(name) != tuple(tensor.shape))
    if wrong or not state:
        raise ConfigError(f"names or shapes of the tensors {wrong} differ between the model and its network")


def _zero_sums(state: Mapping[str, Tensor], layout: SumLayout) -> tuple[Numbers | None, dict[str, Tensor]]:
    """The sum of each tensor; on the CPU all are parts of one block."""
    if any(tensor.device.type != "cpu" for tensor in state.values()):
        return None, {
            name: torch.zeros(tensor.shape, dtype=torch.int64, device=tensor.device) for name, tensor in state.items()
        }
    # One NumPy block, because NumPy asks for large pages: touching small pages for the first time takes longer than
    # adding several updates.
    block = np.zeros(layout.size, np.int64)
    return block, {
        name: torch.from_numpy(block[place.start : place.start + place.size]).view(place.shape)
        for name, place in layout.places.items()
    }
