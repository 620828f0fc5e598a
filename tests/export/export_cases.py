"""Networks, submodels and requests that the tests of exports share."""

from collections.abc import Callable

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.growing import deepen_cell
from subfleet.elastic.network import Family
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.protocol.submodel import Architecture, Explicit, Prefix
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

RESNET = PreactResNet(input_shape=(2, 7, 6), class_count=3, widths=(8, 12), depths=(2, 2), group_size=4)
UNGROUPED_RESNET = PreactResNet(input_shape=(1, 5, 5), class_count=4, widths=(3, 5), depths=(1, 2), group_size=1)
MLP = Mlp(input_shape=(5,), class_count=4, widths=(8, 6), depths=(2, 1), group_size=2)
MODELS: dict[str, Family] = {"resnet": RESNET, "ungrouped": UNGROUPED_RESNET, "mlp": MLP}
PLAIN = OptimiserSettings(momentum=0.0)
FULL_SGD = OptimiserSettings(momentum=0.9, weight_decay=0.01)


def grow_resnet() -> Family:
    """Return a network whose blocks are numbered 0, 2 and 1."""
    return deepen_cell(RESNET, network_of(RESNET).cells[2])


def smallest(model: Family) -> Architecture:
    """One normalisation group on every channel axis, and no optional block."""
    axes = network_of(model).axes.values()
    selections = {axis.name: Prefix(size=axis.granularity) for axis in axes if axis.kind == "channel"}
    return Architecture(axes=tuple(sorted(selections.items())), name="smallest")


def largest(model: Family) -> Architecture:
    """The whole network."""
    return Architecture(blocks=tuple(block.name for block in network_of(model).blocks), name="largest")


def scattered(model: Family) -> Architecture:
    """The last group of every channel axis, and every second block."""
    network = network_of(model)
    selections = {
        axis.name: Explicit(indices=tuple(range(axis.size - axis.granularity, axis.size)))
        for axis in network.axes.values()
        if axis.kind == "channel"
    }
    blocks = tuple(block.name for block in network.blocks)[::2]
    return Architecture(axes=tuple(sorted(selections.items())), blocks=blocks, name="scattered")


CASES: dict[str, Callable[[], tuple[Family, Architecture]]] = {
    "resnet largest": lambda: (RESNET, largest(RESNET)),
    "resnet smallest": lambda: (RESNET, smallest(RESNET)),
    "ungrouped resnet scattered": lambda: (UNGROUPED_RESNET, scattered(UNGROUPED_RESNET)),
    "grown resnet largest": lambda: (grow_resnet(), largest(grow_resnet())),
    "mlp scattered": lambda: (MLP, scattered(MLP)),
    "mlp largest": lambda: (MLP, largest(MLP)),
}
"""Networks with submodels; together they cover every kind of layer, size and submodel."""


def train_request(
    target: str, model: Family = MLP, *, architecture: Architecture | None = None, batch_size: int = 4
) -> TrainRequest:
    """A request with momentum and weight decay."""
    return TrainRequest(
        model=model,
        architecture=largest(model) if architecture is None else architecture,
        target=target,
        batch_size=batch_size,
        objective=ObjectiveSettings(),
        optimiser=FULL_SGD,
    )


def step_of(request: TrainRequest) -> Step:
    """The step that a request is traced from."""
    return training_step(
        build_module(network_of(request.model), request.architecture),
        SampleSpec(shape=request.model.input_shape),
        batch_size=request.batch_size,
        objective=request.objective,
        optimiser=request.optimiser,
    )
