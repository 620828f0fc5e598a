"""The plain modules of families, which nothing has recorded, and what recorded ones divide by."""

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from subfleet.elastic.network import Network
from subfleet.elastic.recording.functions import divide_by_kept
from subfleet.protocol.submodel import Architecture


class Divisions(TorchFunctionMode):
    """The fractions that scalers divide by, in the order of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is divide_by_kept:
            self.rates.append(args[1] / args[2])
        return func(*args, **(kwargs or {}))


def build_plain(network: Network, architecture: Architecture) -> nn.Module:
    """The module of a family with all its channels; a block that a submodel leaves out passes its input on."""
    module = network.config.module()
    for block in network.blocks:
        if block.name not in architecture.blocks:
            module.set_submodule(block.name, nn.Identity())
    return module
