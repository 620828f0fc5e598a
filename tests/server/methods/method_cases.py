"""The methods under test."""

from collections.abc import Mapping
from types import MappingProxyType

from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.dynamic_selection import DynamicSelection

OF_ONE_NETWORK: Mapping[str, type[AnyMethod]] = MappingProxyType(
    {name: kind for name, kind in METHODS.items() if not kind().roles().training.draws_paths}
)
"""Every method for networks without choices; methods that draw paths of a supernet are tested separately."""
QUICK: Mapping[str, AnyMethod] = MappingProxyType(
    {
        **{name: kind() for name, kind in OF_ONE_NETWORK.items()},
        "dynamic_selection": DynamicSelection(
            estimates="estimated", distillation=DistillationSettings(mode="anchored", iterations=3)
        ),
    }
)
"""Each of these methods with its defaults, except for cost estimates and slow distillation."""
