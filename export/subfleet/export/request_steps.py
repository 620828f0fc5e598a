"""From a request to the step that it asks for."""

from subfleet.elastic.families import build_module, network_of
from subfleet.elastic.maps import nested_maps
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import SampleSpec, Step, Student, training_step

__all__ = ["training_step_of"]


def training_step_of(request: TrainRequest) -> Step:
    """The training step of a request's subnet, whatever the target.

    Raises:
        ConfigError: the network or the subnet is not valid, or the student is no part of it.
        ExportError: the subnet cannot be trained so.
    """
    network = network_of(request.model)
    student = None
    if request.student is not None:
        maps = nested_maps(network, request.spec, request.student)
        student = Student(module=build_module(network, request.student), maps=maps)
    return training_step(
        build_module(network, request.spec),
        SampleSpec(shape=request.model.input_shape),
        batch_size=request.batch_size,
        objective=request.objective,
        optimiser=request.optimiser,
        accumulate=request.accumulate,
        recompute=request.recompute,
        student=student,
    )
