"""What subnets cost: told from their shapes, or from a model of the planner where a search looks at many of them."""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.network import Network
from subfleet.export.pricing.model import PriceModel
from subfleet.export.requests import TrainRequest
from subfleet.protocol.errors import ExportError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import Uncompressed
from subfleet.server.assignment import Candidate
from subfleet.server.config import ServerConfig
from subfleet.server.requests import train_request
from subfleet.server.search.limits import INFINITE_BYTES
from subfleet.server.search.query import PriceList
from subfleet.server.updates import update_bytes

__all__ = ["price_list"]

_LOG = logging.getLogger(__name__)


def price_list(config: ServerConfig, network: Network, *, planned: bool, folder: Path | None = None) -> PriceList:
    """What any subnet costs; each is priced once.

    Args:
        config: of the run.
        network: the declaration of the whole model.
        planned: whether memory is told by a model of the planner. That takes seconds for the first subnets, and is at
            most some percent above the exported program's own plan; the estimate takes none and stays below the plan.
        folder: where that model keeps what it has learned.

    Returns:
        A function that raises ConfigError where a spec is no subnet of the network.
    """
    known: dict[str, Candidate] = {}
    models: dict[str, PriceModel] = {}

    def price(spec: SubnetSpec) -> Candidate:
        key = spec.spec_id
        if key not in known:
            known[key] = _priced(config, network, spec, models if planned else None, folder)
        return known[key]

    return price


def _priced(
    config: ServerConfig, network: Network, spec: SubnetSpec, models: dict[str, PriceModel] | None, folder: Path | None
) -> Candidate:
    cost = estimate_cost(network, spec, batch_size=config.training.program_batch_size)
    if models is None:
        # The estimate counts every activation. How few are left when blocks are computed twice only the program knows.
        least_bytes = 2 * cost.weight_bytes if config.training.recompute else cost.training_memory_bytes
        overhead = config.memory_overhead_bytes
        memory: Mapping[str, int] = {target: least_bytes + overhead.get(target, 0) for target in config.targets}
    else:
        memory = _PlannedMemory(config, network, spec, models, folder)
    codec = config.update_codec or config.method.policies().update_codec
    return Candidate(
        spec=spec,
        parameters=cost.parameters,
        forward_macs=cost.forward_macs,
        weight_bytes=cost.weight_bytes,
        update_bytes=cost.weight_bytes if codec == Uncompressed() else update_bytes(network, spec, codec),
        training_memory_bytes=memory,
    )


class _PlannedMemory(Mapping[str, int]):
    """Planned memory by target, told when it is asked for: a fleet may run few of the targets."""

    def __init__(
        self,
        config: ServerConfig,
        network: Network,
        spec: SubnetSpec,
        models: dict[str, PriceModel],
        folder: Path | None,
    ) -> None:
        self._config, self._network, self._spec = config, network, spec
        self._models, self._folder = models, folder
        self._told: dict[str, int] = {}

    def __getitem__(self, target: str) -> int:
        if target not in self._config.targets:
            raise KeyError(target)
        if target not in self._told:
            self._told[target] = self._memory_bytes(target)
        return self._told[target]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config.targets)

    def __len__(self) -> int:
        return len(self._config.targets)

    def _memory_bytes(self, target: str) -> int:
        if target not in self._models:
            training = self._config.method.policies().training(self._config.training_of(1), 1)
            request_of = partial(_request, self._network, target, training)
            self._models[target] = PriceModel(self._network, request_of, folder=self._folder)
        try:
            return self._models[target].memory_bytes(self._spec)
        except ExportError as error:
            _LOG.warning("size %s cannot be trained on %s: %s", self._spec.name, target, error)
            return INFINITE_BYTES


def _request(network: Network, target: str, training: TrainingSettings, spec: SubnetSpec) -> TrainRequest:
    return train_request(network, spec, target, training)
