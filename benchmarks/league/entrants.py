"""Who plays in the league: every method with its usual parameters, and some in more than one form.

All have the same network, local training and budgets. What is a method's own, such as the server's learning rate of
FedAdam or FjORD's widths, is what the method's file says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from subfleet.elastic.teaching import DistillationSettings
from subfleet.methods import AnyMethod
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
from subfleet.methods.standalone import Standalone

__all__ = ["ENTRANTS", "RATES", "Entrant"]

RATES = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Of every method: HeteroFL's five levels, and 3/4, at which a good many of the fleet's budgets end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A method as it plays.

    Attributes:
        method: with its parameters.
        note: what it is, where its name does not say.
        distillation: what the full model teaches after each round; None leaves it to the method.
        model: fields of the network's settings, where the method's paper adds something to it.
        one_subnet: everybody trains the same subnet and nothing else, so that its accuracy is the method's.
        unlimited: its clients have all the memory and link that they could want, as no real fleet has.
        rates: shares of the widths that its subnets may have.
    """

    method: AnyMethod
    note: str = ""
    distillation: DistillationSettings | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    one_subnet: bool = False
    unlimited: bool = False
    rates: tuple[float, ...] = RATES


_NESTED = "each client's largest subnet, so that all can take part"
_BY_WIDTH = HeteroFL(weighting="samples", class_mask=False)
_SELECTION = DynamicSelection(rates=RATES, weighting="samples")
_ANCHORED = DistillationSettings(mode="anchored", learning_rate=1e-4)

ENTRANTS: Mapping[str, Entrant] = MappingProxyType(
    {
        "fedavg": Entrant(method=FedAvg(), note="the whole model, by those who can carry it (exclusive learning)"),
        "fedavg-oracle": Entrant(method=FedAvg(), unlimited=True, note="the whole model, by all, whatever they have"),
        "fedavg-smallest": Entrant(
            method=FedAvg(model="smallest"), one_subnet=True, note="the smallest subnet, by all"
        ),
        "standalone": Entrant(method=Standalone(), note="no federation"),
        "fedprox": Entrant(method=FedProx(model="nested"), note=_NESTED),
        "fedadam": Entrant(method=FedAdam(model="nested"), note=_NESTED),
        "fedyogi": Entrant(method=FedYogi(model="nested"), note=_NESTED),
        "heterofl": Entrant(method=_BY_WIDTH, note="widths alone, as in the paper"),
        "heterofl-depth": Entrant(method=replace(_BY_WIDTH, depth=True), note="widths and depths"),
        "heterofl-distilled": Entrant(
            method=_BY_WIDTH, distillation=_ANCHORED, note="with in-place distillation by a teacher that stays"
        ),
        "heterofl-distilled-copies": Entrant(
            method=_BY_WIDTH,
            distillation=DistillationSettings(mode="copies", learning_rate=1e-3),
            note="with in-place distillation as its paper's text says",
        ),
        "heterofl-distilled-paper": Entrant(
            method=_BY_WIDTH,
            distillation=DistillationSettings(mode="shared", learning_rate=1e-3),
            note="with in-place distillation as its paper's algorithm 1 says: the teacher moves with its students",
        ),
        "fjord": Entrant(method=FjORD(rates=RATES)),
        "fedrolex": Entrant(method=FedRolex()),
        "federated_dropout": Entrant(method=FederatedDropout()),
        "anycostfl": Entrant(method=AnycostFL()),
        "nefl": Entrant(method=NeFL(), model={"learnable_steps": True}, note="with learnable steps"),
        "flexifed-basic": Entrant(method=FlexiFed(sharing="basic")),
        "flexifed-clustered": Entrant(method=FlexiFed(sharing="clustered")),
        "flexifed-max": Entrant(method=FlexiFed(sharing="max")),
        "dynamic_selection": Entrant(
            method=_SELECTION, distillation=_ANCHORED, note="our search, a teacher that stays"
        ),
        "dynamic_selection-undistilled": Entrant(
            method=replace(_SELECTION, distillation=None), note="our search, no distillation"
        ),
        "dynamic_selection-paper": Entrant(
            method=replace(
                _SELECTION, search="paper", weighting="uniform", distillation=DistillationSettings(learning_rate=1e-3)
            ),
            note="the paper's search, its weights and its distillation as printed",
        ),
        "fedfa": Entrant(method=FedFA(), note="untrained models stay as they are"),
        "fedfa-paper": Entrant(method=FedFA(fidelity="paper"), note="copies and sizes as printed"),
    }
)
"""By name, which begins with the name that configurations give the method."""
