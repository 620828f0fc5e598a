"""Federated methods: each one file with its client half and its server half; this table is the only list of them."""

import typing
from collections.abc import Mapping
from types import MappingProxyType

from subfleet.methods.anycostfl import AnycostFL
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.fedadam import FedAdam
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.federated_dropout import FederatedDropout
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fedprox import FedProx
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.fedyogi import FedYogi
from subfleet.methods.fjord import FjORD
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.nefl import NeFL
from subfleet.methods.policies import Method
from subfleet.methods.standalone import Standalone

__all__ = ["METHODS", "AnyMethod", "Method"]

AnyMethod = (
    HeteroFL
    | FedAvg
    | FedProx
    | FedAdam
    | FedYogi
    | Standalone
    | FjORD
    | FedRolex
    | FederatedDropout
    | AnycostFL
    | NeFL
    | FlexiFed
    | DynamicSelection
    | FedFA
)
"""Every method. A configuration's `[method] type = "..."` chooses one of these; add yours here."""

METHODS: Mapping[str, type[AnyMethod]] = MappingProxyType({kind.TYPE: kind for kind in typing.get_args(AnyMethod)})
