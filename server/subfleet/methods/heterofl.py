"""HeteroFL: nested prefix widths, one mean over whoever holds an element.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021, section 3; that subnets may also leave out blocks (`depth`) is ours.

Client half: train the given subnet; logits of classes that the client lacks count as 0 where `class_mask` is on.
Server half: each device gets the largest subnet of the space that its budget carries. Changes are scattered to the
prefixes they came from and averaged element by element over the clients that hold the element; rows of the head count
only from clients that hold the class. An element that nobody holds keeps its bits.
"""

from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.spaces import uniform_space
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.masking import held_classes, with_class_mask
from subfleet.methods.policies import UNIFORM, Policies, Weighting, weigh_by
from subfleet.methods.sizes import whole_depth

__all__ = ["HeteroFL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroFL:
    """Parameters of HeteroFL.

    Attributes:
        weighting: "uniform" counts each update as 1, as the paper's code does; "samples" by its samples.
        class_mask: section 3.3's masked cross-entropy, where labels are classes.
        depth: subnets may also leave out blocks; False cuts widths alone, as the paper does.
    """

    TYPE: ClassVar[str] = "heterofl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="HeteroFL",
        paper="Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for "
        "Heterogeneous Clients, ICLR 2021",
        varies=("width",),
        published={
            "weighting": UNIFORM,
            "class_mask": Published(value=True, told="outputs of classes that a client lacks are trained as well"),
            "depth": Published(value=False, told="subnets leave out blocks too"),
        },
    )
    weighting: Weighting = "uniform"
    class_mask: bool = True
    depth: bool = False

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.policies.Method`."""
        # What is normalised by groups or batches forgets how it was scaled.
        scaled = setting.scaler or setting.norm in ("group", "batch")
        measured = setting.norm != "batch" or setting.norms in ("recalibrated", "calibrated")
        return those_true(
            {
                "nothing is scaled in training (model.scaler)": not scaled,
                "running statistics are not measured anew (norms)": not measured,
            }
        )

    def policies(self) -> Policies:
        """Nested prefixes."""
        space = uniform_space if self.depth else whole_depth
        weigh = weigh_by(self.weighting)
        if not self.class_mask:
            return Policies(space=space, weigh=weigh)
        return Policies(space=space, weigh=weigh, training=with_class_mask, factors=held_classes)
