"""Federated methods: each one file with its client half and its server half; this table is the only list of them."""

import typing
from collections.abc import Mapping
from types import MappingProxyType

from subfleet.server.methods.anycostfl import AnycostFL
from subfleet.server.methods.dynamic_selection import DynamicSelection
from subfleet.server.methods.fedadam import FedAdam
from subfleet.server.methods.fedavg import FedAvg
from subfleet.server.methods.federated_dropout import FederatedDropout
from subfleet.server.methods.fedfa import FedFA
from subfleet.server.methods.fedprox import FedProx
from subfleet.server.methods.fedrolex import FedRolex
from subfleet.server.methods.fedyogi import FedYogi
from subfleet.server.methods.fjord import FjORD
from subfleet.server.methods.flexifed import FlexiFed
from subfleet.server.methods.heterofl import HeteroFL
from subfleet.server.methods.nefl import NeFL
from subfleet.server.methods.policies import Method
from subfleet.server.methods.standalone import Standalone

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
