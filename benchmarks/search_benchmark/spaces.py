"""The search spaces with their cost estimates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Family, Network
from subfleet.elastic.spaces import SearchSpace, search_space, uniform_space
from subfleet.export.estimation.model import EstimateModel
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.programs.supply import build_train_request
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.search.candidates import Candidate
from subfleet.search.estimates import Estimates, estimate_by_plans
from subfleet.search.query import CostEstimates
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings

__all__ = ["LARGE", "SMALL", "TARGET", "TINY", "Case", "create_case"]

TARGET = "onnx"
_KEPT = 2**15
"""Size of the cache of cost estimates, as in rounds while sizes are searched."""
_PAPER_RATES = (0.0625, 0.125, 0.25, 0.5, 1)
"""The paper's ratio set of settings 1 and 2; its 0 drops a block."""
_QUARTERS = (0.25, 0.5, 0.75, 1)
_SIXTEENTHS = tuple(step / 16 for step in range(1, 17))
"""Rates to compare with if a space has every width; its own search starts with depths alone."""


def _create_resnet(widths: Sequence[int], depths: Sequence[int], side: int, channels: int) -> Family:
    return PreactResNet(
        input_shape=(channels, side, side),
        class_count=10,
        widths=tuple(widths),
        depths=tuple(depths),
    )


def _create_mlp(widths: Sequence[int], depths: Sequence[int]) -> Family:
    return Mlp(input_shape=(784,), class_count=10, widths=tuple(widths), depths=tuple(depths))


_RESNET18 = _create_resnet((64, 128, 256, 512), (2, 2, 2, 2), 32, 3)
_CONFIGS: Mapping[str, tuple[Family, tuple[float, ...]]] = MappingProxyType(
    {
        "ResNet-18, the paper's ratios": (_RESNET18, _PAPER_RATES),
        "ResNet-18, every width": (_RESNET18, ()),
        "ResNet-34, the paper's ratios": (_create_resnet((64, 128, 256, 512), (3, 4, 6, 3), 32, 3), _PAPER_RATES),
        "MLP of 8 blocks, quarters": (_create_mlp((512, 256), (4, 4)), _QUARTERS),
        "small ResNet, the paper's ratios": (_create_resnet((64, 128), (2, 2), 28, 1), _PAPER_RATES),
        "small MLP, the paper's ratios": (_create_mlp((512, 256), (2, 2)), _PAPER_RATES),
        "tiny MLP": (_create_mlp((8,), (1,)), (0.5, 1)),
    }
)
LARGE = tuple(_CONFIGS)[:4]
"""Spaces of more than 10^6 submodels."""
SMALL = tuple(_CONFIGS)[4:6]
"""Spaces of some 10^4, which can be listed."""
TINY = tuple(_CONFIGS)[6]
"""Not measured: estimating one of its costs imports everything that cost estimation needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A space to search, with the default configuration of a run.

    Attributes:
        method: the method with the measured search.
        training: settings for the written programs.
        rates: widths to compare with.
        estimate: planned cost estimates; the first call builds their model.
    """

    name: str
    network: Network
    space: SearchSpace
    method: DynamicSelection
    training: TrainingSettings
    rates: tuple[float, ...]
    estimate: CostEstimates

    @property
    def uniform(self) -> tuple[Architecture, ...]:
        """Every width rate with every depth, to compare with."""
        return uniform_space(self.network, self.rates)

    @property
    def ends(self) -> tuple[Candidate, Candidate]:
        """The smallest and the largest submodel."""
        space = self.space
        return self.estimate(space.architecture(space.smallest)), self.estimate(space.architecture(space.largest))


def create_case(name: str) -> Case:
    """Create the space of this name; nothing is estimated yet."""
    model, rates = _CONFIGS[name]
    network, method = network_of(model), DynamicSelection(rates=rates)
    config = Run(name="search", model=model, data=DataSettings(test="none"), method=method)
    training = method.roles().training.for_round(config.compute_training(1), 1)

    @cache
    def estimates() -> MemoryEstimates:
        return EstimateModel(network, build_train_request(network, Architecture(), TARGET, training)).estimates

    def memory(architecture: Architecture) -> Mapping[str, int]:
        return estimate_by_plans(network, TARGET, estimates())(architecture)

    estimate = Estimates(
        network=network,
        costs=Costs(network),
        codec=config.roles.techniques.codec,
        memory=memory,
    )
    return Case(
        name=name,
        network=network,
        space=search_space(network, rates),
        method=method,
        training=training,
        rates=rates or _SIXTEENTHS,
        estimate=lru_cache(maxsize=_KEPT)(estimate),
    )
