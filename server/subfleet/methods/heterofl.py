"""HeteroFL: nested prefix widths, one mean over whoever holds an element.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021, section 3; that submodels may also leave out blocks (`depth`) is ours.

Client half: train the given submodel; logits of classes that the client lacks count as 0 where `class_mask` is on.
Server half: each device gets the largest submodel of the space that its budget carries. Changes are scattered to the
prefixes they came from and averaged element by element over the clients that hold the element; rows of the head count
only from clients that hold the class. An element that nobody holds keeps its bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from subfleet.elastic.network import Network, TensorDecl
from subfleet.elastic.spaces import uniform_space
from subfleet.methods.aggregator import UNIFORM, Aggregator, Participant, Weighting, weigh_by
from subfleet.methods.assigner import Assigner
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import whole_depth
from subfleet.protocol.training import TrainingSettings

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

__all__ = ["HeteroFL", "held_classes", "with_class_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroFL:
    """Parameters of HeteroFL.

    Attributes:
        weighting: "uniform" counts each update as 1, as the paper's code does; "samples" by its samples.
        class_mask: section 3.3's masked cross-entropy, where labels are classes.
        depth: submodels may also leave out blocks; False cuts widths alone, as the paper does.
    """

    TYPE: ClassVar[str] = "heterofl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="HeteroFL",
        paper="Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for "
        "Heterogeneous Clients, ICLR 2021",
        varies=("width",),
        published={
            "weighting": UNIFORM,
            "class_mask": Published(value=True, told="outputs of classes that a client lacks are trained too"),
            "depth": Published(value=False, told="submodels also leave out blocks"),
        },
    )
    weighting: Weighting = "uniform"
    class_mask: bool = True
    depth: bool = False

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        # What is normalised by groups or batches forgets how it was scaled.
        scaled = setting.scaler or setting.norm in ("group", "batch")
        measured = setting.norm != "batch" or setting.techniques.norms in ("recalibrated", "calibrated")
        return those_true(
            {
                "nothing is scaled in training (model.scaler)": not scaled,
                "running statistics are not measured again (norms)": not measured,
            }
        )

    def roles(self) -> Roles:
        """Nested prefixes."""
        space = uniform_space if self.depth else whole_depth
        roles = Roles(assigner=Assigner(space=space), aggregator=Aggregator(weigh=weigh_by(self.weighting)))
        return with_class_mask(roles) if self.class_mask else roles


def with_class_mask(roles: Roles) -> Roles:
    """A method's roles with masked labels, in training and in aggregation."""
    return replace(
        roles,
        training=replace(roles.training, for_round=_masked_training),
        aggregator=replace(roles.aggregator, factors=held_classes),
    )


def _masked_training(settings: TrainingSettings, round_number: int) -> TrainingSettings:
    """The local training with logits of absent classes counted as 0, where labels are classes."""
    if not settings.objective.over_classes:
        return settings
    return replace(settings, objective=replace(settings.objective, class_mask=True))


def held_classes(network: Network, client: Participant) -> Mapping[str, float | Tensor]:
    """Factors of 1 on the rows of classes that the client holds, and of 0 on the others.

    None where its labels are no classes.
    """
    if not client.class_counts:
        return {}
    tensors = [decl for decl in network.tensors.values() if _class_dimension(network, decl) is not None]
    return {decl.name: _rows(network, decl, client) for decl in tensors}


def _class_dimension(network: Network, decl: TensorDecl) -> int | None:
    kinds = [network.axes[dim].kind if isinstance(dim, str) else None for dim in decl.axes]
    return kinds.index("class") if "class" in kinds else None


def _rows(network: Network, decl: TensorDecl, client: Participant) -> Tensor:
    import torch  # by those who aggregate, not by those who read settings

    dimension = _class_dimension(network, decl) or 0
    counts = (*client.class_counts, *([0] * (decl.shape[dimension] - len(client.class_counts))))
    held = torch.tensor([float(count > 0) for count in counts])
    return held.reshape([-1 if place == dimension else 1 for place in range(len(decl.shape))])
