"""Federated methods: each one file with its client half and its server half; this table is the only list of them."""

import typing
from collections.abc import Mapping
from types import MappingProxyType

from subfleet.server.methods.base import Method
from subfleet.server.methods.fedavg import FedAvg
from subfleet.server.methods.heterofl import HeteroFL

__all__ = ["METHODS", "AnyMethod", "Method"]

AnyMethod = HeteroFL | FedAvg
"""Every method. A configuration's `[method] type = "..."` chooses one of these; add yours here."""

METHODS: Mapping[str, type[AnyMethod]] = MappingProxyType({kind.TYPE: kind for kind in typing.get_args(AnyMethod)})
