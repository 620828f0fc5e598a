"""The spaces that are searched, with their prices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.families import network_of
from subfleet.elastic.network import ModelConfig
from subfleet.elastic.spaces import SearchSpace, search_space, uniform_space
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.assignment import Candidate
from subfleet.server.search.query import PriceList

__all__ = ["LARGE", "SMALL", "TARGET", "Case", "case_of"]

TARGET = "onnx"
_PAPER_RATES = (0.0625, 0.125, 0.25, 0.5, 1)
"""The paper's ratio set of settings 1 and 2; its 0 drops a block."""
_QUARTERS = (0.25, 0.5, 0.75, 1)
_SIXTEENTHS = tuple(step / 16 for step in range(1, 17))
_BATCH = 16


def _resnet(widths: Sequence[int], depths: Sequence[int], side: int, channels: int) -> ModelConfig:
    return ModelConfig(
        family="preact_resnet",
        input_shape=(channels, side, side),
        class_count=10,
        widths=tuple(widths),
        depths=tuple(depths),
    )


def _mlp(widths: Sequence[int], depths: Sequence[int]) -> ModelConfig:
    return ModelConfig(family="mlp", input_shape=(784,), class_count=10, widths=tuple(widths), depths=tuple(depths))


_RESNET18 = _resnet((64, 128, 256, 512), (2, 2, 2, 2), 32, 3)
_CONFIGS: Mapping[str, tuple[ModelConfig, tuple[float, ...]]] = MappingProxyType(
    {
        "ResNet-18, the paper's ratios": (_RESNET18, _PAPER_RATES),
        "ResNet-18, every width": (_RESNET18, ()),
        "ResNet-34, the paper's ratios": (_resnet((64, 128, 256, 512), (3, 4, 6, 3), 32, 3), _PAPER_RATES),
        "MLP of 8 blocks, quarters": (_mlp((512, 256), (4, 4)), _QUARTERS),
        "small ResNet, the paper's ratios": (_resnet((64, 128), (2, 2), 28, 1), _PAPER_RATES),
        "small MLP, the paper's ratios": (_mlp((512, 256), (2, 2)), _PAPER_RATES),
    }
)
LARGE = tuple(_CONFIGS)[:4]
SMALL = tuple(_CONFIGS)[4:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A space to search.

    Attributes:
        uniform: every width rate of it with every depth.
    """

    name: str
    space: SearchSpace
    uniform: tuple[SubnetSpec, ...]
    price: PriceList

    @property
    def ends(self) -> tuple[Candidate, Candidate]:
        """The smallest and the largest subnet."""
        space = self.space
        return self.price(space.spec(space.smallest)), self.price(space.spec(space.largest))


def case_of(name: str) -> Case:
    """A space by its name."""
    config, rates = _CONFIGS[name]
    network = network_of(config)
    known: dict[SubnetSpec, Candidate] = {}

    def price(spec: SubnetSpec) -> Candidate:
        if spec not in known:
            cost = estimate_cost(network, spec, batch_size=_BATCH)
            known[spec] = Candidate(
                spec=spec,
                parameters=cost.parameters,
                forward_macs=cost.forward_macs,
                weight_bytes=cost.weight_bytes,
                update_bytes=cost.weight_bytes,
                training_memory_bytes=MappingProxyType({TARGET: cost.training_memory_bytes}),
            )
        return known[spec]

    uniform = uniform_space(network, rates or _SIXTEENTHS)
    return Case(name=name, space=search_space(network, rates), uniform=uniform, price=price)
