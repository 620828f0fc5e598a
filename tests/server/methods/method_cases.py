"""Every method as the tests try it."""

from collections.abc import Mapping
from types import MappingProxyType

from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.dynamic_selection import DynamicSelection

OF_ONE_NETWORK: Mapping[str, type[AnyMethod]] = MappingProxyType(
    {name: kind for name, kind in METHODS.items() if not kind().roles().training.draws_paths}
)
"""Every method that goes with a network without choices; one that draws paths of a supernet has tests of its own."""
QUICK: Mapping[str, AnyMethod] = MappingProxyType(
    {
        **{name: kind() for name, kind in OF_ONE_NETWORK.items()},
        "dynamic_selection": DynamicSelection(
            estimates="estimated", distillation=DistillationSettings(mode="anchored", iterations=3)
        ),
    }
)
"""Every such method as it is by default, but for cost estimates and for lessons that take seconds for each network."""
