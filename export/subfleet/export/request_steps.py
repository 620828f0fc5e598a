"""Builds the step that a request describes, and the input of its network."""

from torch import nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.maps import nested_maps
from subfleet.elastic.network import Network
from subfleet.export.requests import ProgramRequest, TrainRequest
from subfleet.export.steps import SampleSpec, Step, Student, evaluation_step, training_step


def sample_of(network: Network) -> SampleSpec:
    """Return the input of one sample of a network: numbers, or indices if the network reads symbols."""
    if network.symbols:
        return SampleSpec(shape=network.config.input_shape, dtype="I64", limit=network.symbols)
    return SampleSpec(shape=network.config.input_shape)


def training_step_of(request: TrainRequest, module: nn.Module | None = None) -> Step:
    """Build the training step of a request's submodel, for any target.

    Args:
        request: the request.
        module: a network of other sizes, in place of the request's submodel and student.

    Raises:
        ConfigError: the network or the submodel is not valid, or the student is not part of it.
        ExportError: the submodel cannot be trained.
    """
    network = network_of(request.model)
    student = None
    if request.student is not None and module is None:
        maps = nested_maps(network, request.architecture, request.student)
        student = Student(module=build_module(network, request.student), maps=maps)
    return training_step(
        build_module(network, request.architecture) if module is None else module,
        sample_of(network),
        batch_size=request.batch_size,
        objective=request.objective,
        optimiser=request.optimiser,
        accumulate=request.accumulate,
        recompute=request.recompute,
        one_part=request.one_part,
        student=student,
    )


def step_of(request: ProgramRequest) -> Step:
    """Build the step of a request's submodel, for any target and purpose; errors as in `training_step_of`."""
    if isinstance(request, TrainRequest):
        return training_step_of(request)
    network = network_of(request.model)
    module = build_module(network, request.architecture)
    return evaluation_step(module, sample_of(network), batch_size=request.batch_size, objective=request.objective)
