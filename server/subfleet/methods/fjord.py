"""FjORD: ordered dropout, with self-distillation between a client's largest submodel and a smaller one inside it.

Horváth et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
NeurIPS 2021, algorithm 1 and section 3.3.

Client half: train the assigned width on the labels, and together with it a nested width on the labels and on the larger
one's outputs. Without self-distillation: train a width drawn from the widths that fit.
Server half: nested prefixes; an element is averaged, weighted by samples, over the clients that hold it.

The paper draws the nested width for every batch, from those up to the client's own. A program has one shape, so here it
is drawn for every client and round, with the same probabilities: there are as many programs as pairs of widths, and
over a run the expectation is the same. If the client's own width is drawn there is nothing to teach: the term and its
gradient are 0, and the program is that of the labels alone. So the smallest width never takes the memory of two
networks.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from subfleet.elastic.network import Network
from subfleet.methods.assigner import Assigner, Draw, draw_size
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import LocalTraining, Roles, change_objective
from subfleet.methods.sizes import list_widths
from subfleet.protocol.bounds import Length, Range, checked
from subfleet.protocol.limits import Fraction
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FjORD:
    """Parameters of FjORD.

    Attributes:
        rates: the widths P of the paper, each above 0 and at most 1.
        self_distillation: as in section 3.3.
        distillation_weight: fraction of the distillation term in the nested submodel's loss, 0 to 1. Below 1, when the
            client's own width is drawn, the paper counts the labels partly twice; here they count once.
        temperature: of the distillation term, above 0.
    """

    TYPE: ClassVar[str] = "fjord"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FjORD",
        paper="Horváth et al., FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered "
        "Dropout, NeurIPS 2021",
        varies=("width",),
        judges=("norms",),
        departures={
            "a width is drawn per client and round, not per batch": always,
            "running statistics are shared by all widths": (
                lambda method, setting: setting.norm == "batch" and setting.techniques.norms != "bank"
            ),
            "gains and biases of norms are separate for each width": (
                lambda method, setting: setting.norm != "none" and setting.techniques.norms == "bank"
            ),
        },
    )
    rates: Annotated[tuple[Annotated[float, Range(least=0.001, most=1)], ...], Length(least=1)] = parameter(
        (0.2, 0.4, 0.6, 0.8, 1.0), otherwise="widths are not 0.2 to 1.0 in fifths"
    )
    self_distillation: bool = parameter(True, otherwise="there is no self-distillation")
    distillation_weight: Fraction = parameter(
        1.0,
        otherwise="labels count once when the client's own width is drawn",
        matters=lambda method: method.self_distillation,
    )
    temperature: float = 1.0

    def roles(self) -> Roles:
        """Ordered dropout."""
        assigner = Assigner(space=lambda network, rates: list_widths(network, self.rates))
        if not self.self_distillation:
            return Roles(
                assigner=replace(assigner, assign=lambda context: draw_size(context, context.fitting, "width"))
            )
        training = LocalTraining(for_round=self._set_distillation, student=self._draw_student)
        return Roles(assigner=assigner, training=training)

    def _set_distillation(self, settings: TrainingSettings, round_number: int) -> TrainingSettings:
        weight = {"distillation_weight": self.distillation_weight}
        return change_objective(settings, weight, distillation="self", temperature=self.temperature)

    def _draw_student(self, network: Network, size: Architecture, draw: Draw) -> Architecture | None:
        largest = network.parameter_count(size)
        nested = [width for width in list_widths(network, self.rates) if network.parameter_count(width) <= largest]
        student = draw.stream("student").choice(nested)
        return None if student.architecture_id == size.architecture_id else student
