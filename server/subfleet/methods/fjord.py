"""FjORD: ordered dropout, with self-distillation between a client's largest submodel and a smaller one inside it.

Horváth et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
NeurIPS 2021, algorithm 1 and section 3.3.

Client half: train the largest width that it was given on its labels, and together with it a nested width on the labels
and on the larger one's outputs. Without self-distillation: train a width drawn from those that fit.
Server half: nested prefixes; an element is averaged, weighted by samples, over the clients whose width holds it.

The paper draws the nested width anew for every batch, out of those up to the client's own. A program has one shape,
so here it is drawn for every client and round, each as likely: as many programs as there are pairs of widths, and over
a run the same expectation. Where the client's own width is drawn there is nothing to teach: the term is 0 and so is
its gradient, and the program is that of the labels alone. So the smallest width never takes the memory of two networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from subfleet.elastic.network import Network
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, Draw
from subfleet.methods.describing import MethodInfo, Published, Setting, those_true
from subfleet.methods.local_training import LocalTraining
from subfleet.methods.roles import Roles
from subfleet.methods.sizes import whole_depth
from subfleet.protocol.bounds import Length, Range, checked
from subfleet.protocol.limits import Fraction
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings

__all__ = ["FjORD"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FjORD:
    """Parameters of FjORD.

    Attributes:
        rates: the widths P of the paper, each above 0 and at most 1.
        self_distillation: section 3.3's.
        distillation_weight: fraction of the distillation term in the nested submodel's loss, 0 to 1. Below 1 the paper
            counts the labels twice in part where the client's own width is drawn; here they count once.
        temperature: of the distillation term, above 0.
    """

    TYPE: ClassVar[str] = "fjord"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FjORD",
        paper="Horváth et al., FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered "
        "Dropout, NeurIPS 2021",
        varies=("width",),
        judges=("norms",),
        published={
            "rates": Published(value=(0.2, 0.4, 0.6, 0.8, 1.0), told="widths are not 0.2 to 1.0 in fifths"),
            "self_distillation": Published(value=True, told="there is no self-distillation"),
            "distillation_weight": Published(
                value=1.0,
                told="labels count once when the client's own width is drawn",
                matters=lambda method: method.self_distillation,
            ),
            "temperature": None,
        },
    )
    rates: Annotated[tuple[Annotated[float, Range(least=0.001, most=1)], ...], Length(least=1)] = (
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
    )
    self_distillation: bool = True
    distillation_weight: Fraction = 1.0
    temperature: float = 1.0

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        batch, own = setting.norm == "batch", setting.techniques.norms == "bank"
        return (
            "a width is drawn per client and round, not per batch",
            *those_true(
                {
                    "running statistics are shared by all widths": batch and not own,
                    "gains and biases of norms are separate for each width": own and setting.norm != "none",
                }
            ),
        )

    def roles(self) -> Roles:
        """Ordered dropout."""
        if not self.self_distillation:
            return Roles(assigner=Assigner(space=self._space, assign=_any_that_fits))
        return Roles(
            assigner=Assigner(space=self._space),
            training=LocalTraining(for_round=self._for_round, student=self._student),
        )

    def _space(self, network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
        return whole_depth(network, self.rates)

    def _for_round(self, settings: TrainingSettings, round_number: int) -> TrainingSettings:
        objective = replace(settings.objective, distillation="self", temperature=self.temperature)
        return replace(settings, objective=objective, distillation_weight=self.distillation_weight)

    def _student(self, network: Network, size: Architecture, draw: Draw) -> Architecture | None:
        largest = network.parameter_count(size)
        nested = [one for one in whole_depth(network, self.rates) if network.parameter_count(one) <= largest]
        drawn = draw.stream("student").choice(nested)
        return None if drawn.architecture_id == size.architecture_id else drawn


def _any_that_fits(context: AssignmentContext) -> Assignment:
    fitting = [one for one in context.candidates if context.allows(one)]
    return Assignment(candidate=context.draw.stream("width").choice(fitting) if fitting else None)
