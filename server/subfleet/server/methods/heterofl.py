"""HeteroFL with depth: nested prefix widths and skippable blocks, one mean over whoever holds an element.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021, section 3; depth is ours.

Client half: train the given subnet; logits of classes that the client lacks count as 0 where `class_mask` is on.
Server half: each device gets the largest subnet of the space that its budget carries. Changes are scattered to the
prefixes they came from and averaged element by element over the clients that hold the element; rows of the head count
only from clients that hold the class. An element that nobody holds keeps its bits.
"""

from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.spaces import uniform_space
from subfleet.server.methods.masking import held_classes, with_class_mask
from subfleet.server.methods.policies import MethodInfo, Policies, Weighting, weigh_by
from subfleet.server.methods.sizes import whole_depth

__all__ = ["HeteroFL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroFL:
    """Parameters of HeteroFL.

    Attributes:
        weighting: "samples" counts an update by its samples; "uniform" counts each as 1, as the paper's code does.
        class_mask: section 3.3's masked cross-entropy.
        depth: subnets may also leave out blocks; False cuts widths alone, as the paper does.
    """

    TYPE: ClassVar[str] = "heterofl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="HeteroFL",
        paper="Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for "
        "Heterogeneous Clients, ICLR 2021",
        varies=("width", "depth"),
    )
    weighting: Weighting = "samples"
    class_mask: bool = False
    depth: bool = True

    def policies(self) -> Policies:
        """Nested prefixes."""
        space = uniform_space if self.depth else whole_depth
        weigh = weigh_by(self.weighting)
        if not self.class_mask:
            return Policies(space=space, weigh=weigh)
        return Policies(space=space, weigh=weigh, training=with_class_mask, factors=held_classes)
