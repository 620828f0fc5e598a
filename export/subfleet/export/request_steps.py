"""From a request to the step that it asks for."""

from subfleet.elastic.families import build_module, network_of
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import SampleSpec, Step, training_step

__all__ = ["training_step_of"]


def training_step_of(request: TrainRequest) -> Step:
    """The training step of a request's subnet, whatever the target.

    Raises:
        ConfigError: the network or the subnet is not valid.
        ExportError: the subnet cannot be trained so.
    """
    return training_step(
        build_module(network_of(request.model), request.spec),
        SampleSpec(shape=request.model.input_shape),
        batch_size=request.batch_size,
        objective=request.objective,
        optimiser=request.optimiser,
        accumulate=request.accumulate,
        recompute=request.recompute,
    )
