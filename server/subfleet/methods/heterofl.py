"""HeteroFL: nested prefix widths, with one mean over the clients that hold an element.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021, section 3; that submodels may also leave out blocks (`depth`) is ours.

Client half: train the given submodel; with `class_mask`, logits of classes that the client lacks count as 0.
Server half: each device gets the largest submodel of the space that fits its budget. Changes are scattered to the
prefixes they came from and averaged element by element over the clients that hold the element; rows of the head count
only from clients with samples of the class. An element that nobody holds keeps its bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.methods.aggregator import COUNTED_BY_SAMPLES, Aggregator, Participant, Tensor, Weighting, weigh_by
from subfleet.methods.assigner import Assigner
from subfleet.methods.describing import MethodInfo, parameter
from subfleet.methods.roles import Roles, change_objective
from subfleet.methods.sizes import list_widths
from subfleet.protocol.training import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroFL:
    """Parameters of HeteroFL.

    Attributes:
        weighting: "uniform" counts each update as 1, as the paper's code does; "samples" by its samples.
        class_mask: the masked cross-entropy of section 3.3, if labels are classes.
        depth: submodels may also leave out blocks; False varies widths alone, as the paper does.
    """

    TYPE: ClassVar[str] = "heterofl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="HeteroFL",
        paper="Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for "
        "Heterogeneous Clients, ICLR 2021",
        varies=("width",),
        departures={
            # Norms over groups or batches remove any scale.
            "nothing is scaled in training (model.scaler)": (
                lambda method, setting: not setting.scaler and setting.norm not in ("group", "batch")
            ),
            "running statistics are not measured again (norms)": (
                lambda method, setting: (
                    setting.norm == "batch" and setting.techniques.norms not in ("recalibrated", "calibrated")
                )
            ),
        },
    )
    weighting: Weighting = parameter("uniform", otherwise=COUNTED_BY_SAMPLES)
    class_mask: bool = parameter(True, otherwise="outputs of classes that a client lacks are trained too")
    depth: bool = parameter(False, otherwise="submodels also leave out blocks")

    def roles(self) -> Roles:
        """Nested prefixes."""
        space = uniform_space if self.depth else list_widths
        roles = Roles(assigner=Assigner(space=space), aggregator=Aggregator(weigh=weigh_by(self.weighting)))
        return with_class_mask(roles) if self.class_mask else roles


def with_class_mask(roles: Roles) -> Roles:
    """A method's roles with masked labels, in training and in aggregation."""
    return replace(
        roles,
        training=replace(roles.training, for_round=_mask_training),
        aggregator=replace(roles.aggregator, factors=mask_classes),
    )


def _mask_training(settings: TrainingSettings, round_number: int) -> TrainingSettings:
    """Count logits of absent classes as 0, if labels are classes."""
    return change_objective(settings, class_mask=True) if settings.objective.over_classes else settings


def mask_classes(network: Network, client: Participant) -> Mapping[str, float | Tensor]:
    """Factors of 1 on the rows of classes that the client has samples of, and of 0 on the others.

    None if its labels are no classes.
    """
    if not client.class_counts:
        return {}
    import torch  # for aggregation; settings are read without it

    factors = {}
    for decl in network.tensors.values():
        kinds = [network.axes[dim].kind if isinstance(dim, str) and dim in network.axes else None for dim in decl.axes]
        if "class" not in kinds:
            continue
        dimension = kinds.index("class")
        counts = (*client.class_counts, *([0] * (decl.shape[dimension] - len(client.class_counts))))
        held = torch.tensor([float(count > 0) for count in counts])
        factors[decl.name] = held.reshape([-1 if dim == dimension else 1 for dim in range(len(decl.shape))])
    return factors
