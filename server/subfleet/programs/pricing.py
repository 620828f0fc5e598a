"""What subnets cost: exactly, but for memory, which is told from their shapes or by a model of the exporter's plans."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache

from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.elastic.network import Network
from subfleet.elastic.update_form import update_bytes
from subfleet.export.pricing.model import PriceModel
from subfleet.programs.requests import train_request
from subfleet.protocol.errors import ExportError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.update_codecs import Uncompressed
from subfleet.search.candidates import Candidate
from subfleet.search.limits import INFINITE_BYTES
from subfleet.search.query import PriceList
from subfleet.settings.config import ServerConfig

__all__ = ["price_list"]

_LOG = logging.getLogger(__name__)
_FLOAT_BYTES = 4
_KEPT = 2**15
"""Prices that are kept: a search asks for the neighbours of what it knows again and again."""

_MemoryOf = Callable[[SubnetSpec], Mapping[str, int]]


def price_list(config: ServerConfig, network: Network, *, planned: bool) -> PriceList:
    """What any subnet costs.

    Args:
        config: of the run.
        network: the declaration of the whole model.
        planned: whether memory is told by a model of the planner. It takes seconds to make, and is nearly always within
            some percent of the exported program's own plan; the estimate takes none and stays below the plan.

    Returns:
        A function that raises ConfigError where a spec is no subnet of the network.
    """
    costs = Costs(network)
    codec = config.update_codec or config.method.policies().update_codec
    memory_of = _planned(config, network) if planned else _estimated(config, network)

    @lru_cache(maxsize=_KEPT)
    def price(spec: SubnetSpec) -> Candidate:
        network.check(spec)
        ((parameters, forward_macs),) = costs.of([spec])
        weight_bytes = _FLOAT_BYTES * parameters
        return Candidate(
            spec=spec,
            parameters=parameters,
            forward_macs=forward_macs,
            weight_bytes=weight_bytes,
            update_bytes=weight_bytes if codec == Uncompressed() else update_bytes(network, spec, codec),
            training_memory_bytes=memory_of(spec),
        )

    return price


def _estimated(config: ServerConfig, network: Network) -> _MemoryOf:
    def memory_of(spec: SubnetSpec) -> Mapping[str, int]:
        cost = estimate_cost(network, spec, batch_size=config.training.program_batch_size)
        # The estimate counts every activation. How few are left when blocks are computed twice only the program knows.
        least_bytes = 2 * cost.weight_bytes if config.training.recompute else cost.training_memory_bytes
        return {target: least_bytes + config.memory_overhead_bytes.get(target, 0) for target in config.targets}

    return memory_of


def _planned(config: ServerConfig, network: Network) -> _MemoryOf:
    training = config.method.policies().training(config.training_of(1), 1)

    @cache  # one for each target
    def model_of(target: str) -> MemoryPrices | None:
        try:
            return PriceModel(network, train_request(network, SubnetSpec(), target, training)).prices
        except ExportError as error:
            _LOG.warning("the network cannot be trained on %s: %s", target, error)
            return None

    return lambda spec: _PlannedMemory(network, config.targets, spec, model_of)


class _PlannedMemory(Mapping[str, int]):
    """Planned memory by target, told when it is asked for: a fleet may run few of the targets."""

    __slots__ = ("_model_of", "_network", "_spec", "_targets", "_told")

    def __init__(
        self,
        network: Network,
        targets: tuple[str, ...],
        spec: SubnetSpec,
        model_of: Callable[[str], MemoryPrices | None],
    ) -> None:
        self._network = network
        self._targets, self._spec, self._model_of = targets, spec, model_of
        self._told: dict[str, int] = {}

    def __getitem__(self, target: str) -> int:
        if target not in self._targets:
            raise KeyError(target)
        if target not in self._told:
            model = self._model_of(target)
            self._told[target] = INFINITE_BYTES if model is None else model.memory_bytes(self._network, [self._spec])[0]
        return self._told[target]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
