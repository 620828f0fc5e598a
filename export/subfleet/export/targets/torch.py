"""Programs for PyTorch itself, for laptops and servers: the request as JSON, and the weights of a model.

Nothing in them is executed or unpickled. A trainer builds the network from its declaration, as the server does, and
runs the same step that the other targets' programs are traced from. So they are no `Target`: there is no graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, fx, nn

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.elastic.building import build_module, count_parameters, network_of, record_of
from subfleet.elastic.families import AnyFamily
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.elastic.growing import describe_recorded
from subfleet.elastic.network import Family
from subfleet.elastic.supernets import Supernet
from subfleet.export.memory.blocks import activation_peak_bytes
from subfleet.export.memory.step_bytes import fed_bytes, optimiser_bytes, value_bytes, weights_bytes
from subfleet.export.request_steps import step_of, training_step_of
from subfleet.export.requests import EvaluateRequest, ProgramRequest, TrainRequest
from subfleet.export.steps import Step
from subfleet.export.tracing import trace
from subfleet.export.verification.verifying import seeded_generator, verify_evaluation, verify_training
from subfleet.export.versions import tool_versions
from subfleet.protocol.bounds import checked
from subfleet.protocol.class_names import ClassNames
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import Program, ProgramManifest, Role
from subfleet.protocol.schema import ADDED_LATER, canonical_json, from_plain, parse_json, to_plain
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.tensors import decode_container
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings
from subfleet.protocol.transform import DataTransform

TARGET = "torch"
_MAX_BODY_BYTES = 2**20
_TENSORS: frozenset[Role] = frozenset({"parameter", "buffer", "frozen"})
_MAX_PARAMETERS = 2**28
_MAX_BLOCKS = 2**12
_MAX_SIZE = 2**24
_MODEL = "model"
BASE_BYTES = 6_000_000
"""What the first steps of any network take: PyTorch's own tables, and what a hundred rounds of two submodels leave."""
_OPERATOR_BYTES, _CONVOLUTION_BYTES = 8_000, 300_000
"""What the first steps take for each operator, for its autograd node and small blocks of the heap, and for the kernels
that oneDNN compiles for a convolution and its two gradients. Measured: 1.4 to 7 kB in LSTMs (up to 13 MB of their 55 to
68 depend on how the C library cuts its heap), and 0.3 to 0.4 MB in networks of up to 52 convolutions."""

# Eager PyTorch has no memory plan: Python frees tensors later than a graph could, oneDNN copies weights and activations
# to layouts of its own, and the heap is left with holes. So the plan has a margin: over 30 trainings in
# fresh processes (every family whole, half and a quarter as wide; LSTMs of one layer and two) it is 1.04 to 2.3 times
# what was measured, and up to 7 MB more where networks are tiny.
ACTIVATION_FRACTION = 0.75
PARAMETER_FRACTION = 2.25
OPTIMISER_FRACTION = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class TorchModel:
    """The metadata of an inference model's file: its network and its data."""

    model: AnyFamily
    architecture: Architecture
    classes: ClassNames = field(default=(), metadata=ADDED_LATER)
    objective: Objective = field(default="cross_entropy", metadata=ADDED_LATER)
    transform: DataTransform | None = field(default=None, metadata=ADDED_LATER)


def write_torch_program(request: ProgramRequest) -> Program:
    """Write the training or evaluation program of a submodel.

    Raises:
        ConfigError: the network or the submodel is not valid.
        ExportError: the submodel cannot be trained, or run.
    """
    plain = _carry_record(remove_names(request))
    step = step_of(plain)
    manifest = ProgramManifest(
        program_id=request.program_id,
        target=TARGET,
        purpose="train" if isinstance(plain, TrainRequest) else "evaluate",
        batch_size=request.batch_size,
        inputs=step.inputs,
        outputs=step.outputs,
        memory=_plan(step, plain),
        max_abs_diff=_difference(step, plain, seeded_generator(request.program_id)),
        versions=tool_versions(TARGET),
    )
    return Program(manifest=manifest, body=canonical_json(plain))


def remove_names(request: ProgramRequest) -> ProgramRequest:
    """Remove display names, which do not affect a program."""
    plain = replace(request, architecture=replace(request.architecture, name=""))
    if isinstance(plain, TrainRequest) and plain.student is not None:
        return replace(plain, student=replace(plain.student, name=""))
    return plain


def _carry_record(request: ProgramRequest) -> ProgramRequest:
    """Replace a network's settings by its record: to record a large one would take a device 100 MB."""
    model = request.model
    if isinstance(model, Supernet | Recorded):
        return request
    return replace(request, model=describe_recorded(model, record_of(model)))


def _difference(step: Step, request: ProgramRequest, generator: torch.Generator) -> float:
    """Return the difference from the original module; raise ExportError if it is too large."""

    def run(example: Sequence[Tensor]) -> Sequence[Tensor]:
        return step.run(*example)

    if isinstance(request, TrainRequest):
        return verify_training(run, step, generator).max_abs_diff
    return verify_evaluation(run, step, generator)


def read_torch_step(program: Program) -> Step:
    """Return the step of a program; nothing is allocated before its shapes are known to match the manifest.

    Raises:
        ProtocolError: the body is not such a program, or does not match the manifest.
        ConfigError: the network or the submodel is not valid.
        ExportError: the submodel cannot be trained.
    """
    step = step_of(read_torch_request(program))
    if (step.inputs, step.outputs) != (program.manifest.inputs, program.manifest.outputs):
        odd = {*step.inputs, *step.outputs} ^ {*program.manifest.inputs, *program.manifest.outputs}
        name = min(value.name for value in odd)
        raise ProtocolError(f"the program's values differ from its manifest, first in {name!r:.80}")
    return step


def read_torch_request(program: Program) -> ProgramRequest:
    """Return the request of a program, with shapes that match the manifest.

    Raises:
        ProtocolError: the body is not such a program, or does not match the manifest.
    """
    plain = parse_json(program.body, max_bytes=_MAX_BODY_BYTES)
    kind = plain.get("type") if isinstance(plain, dict) else None
    request_type: type[ProgramRequest] = EvaluateRequest if kind == EvaluateRequest.TYPE else TrainRequest
    request = from_plain(request_type, plain, where="the program")
    _check_shapes(
        TorchModel(model=request.model, architecture=request.architecture),
        {value.tensor: value.shape for value in program.manifest.inputs if value.role in _TENSORS},
    )
    return request


def write_torch_model(described: TorchModel, state: Mapping[str, Tensor]) -> bytes:
    """Write an inference model: a tensor container of the weights, with its network and its data as metadata."""
    network = replace(described, architecture=replace(described.architecture, name=""))
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}
    return encode_arrays(arrays, {_MODEL: canonical_json(network).decode()})


def read_torch_model(content: bytes) -> tuple[TorchModel, nn.Module]:
    """Return the network of an inference model with its weights, in evaluation mode.

    Raises:
        ProtocolError: the content is not such a model, or its weights do not fit the network.
        ConfigError: the network or the submodel is not valid.
    """
    text = decode_container(content).metadata.get(_MODEL)
    if text is None:
        raise ProtocolError("the model names no network; deploy it again with the target 'torch'")
    described = from_plain(TorchModel, parse_json(text.encode(), max_bytes=_MAX_BODY_BYTES), where="the model")
    arrays = decode_arrays(content)
    _check_shapes(described, {name: array.shape for name, array in arrays.items()})
    module = build_module(network_of(described.model), described.architecture)
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    return described, module.eval()


def run_smallest_step(device: str) -> None:
    """Train a tiny network once, so that PyTorch loads everything that it only loads once."""
    model = PreactResNet(input_shape=(1, 4, 4), class_count=2, widths=(4,), depths=(1,))
    request = TrainRequest(
        model=model,
        architecture=Architecture(),
        target=TARGET,
        batch_size=2,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(),
    )
    step = training_step_of(request)
    example = step.example(torch.Generator().manual_seed(0))
    with torch.device(device):
        step.run(*(tensor.to(device) for tensor in example))


def _check_shapes(described: TorchModel, given: Mapping[str, tuple[int, ...]]) -> None:
    blocks = sum(getattr(described.model, "depths", ()))
    if blocks > _MAX_BLOCKS:
        raise ProtocolError(f"the network has {blocks} blocks, but may have {_MAX_BLOCKS}")
    # Even a shape may be too large for a number.
    largest = max(_sizes_of(described.model), default=0)
    if largest > _MAX_SIZE:
        raise ProtocolError(f"the request's network has a size of {largest}, but may have {_MAX_SIZE} at most")
    try:
        parameters = count_parameters(described.model)
        if parameters > _MAX_PARAMETERS:
            raise ProtocolError(f"the network has {parameters} parameters, but may have {_MAX_PARAMETERS} at most")
        shapes = network_of(described.model).shapes(described.architecture)
    except (RuntimeError, ValueError, ArithmeticError) as error:
        raise ProtocolError(f"the request's network cannot be built: {error!s:.200}") from error
    if shapes != given:
        odd = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ProtocolError(
            f"tensor {odd[0]!r:.80} has the shape {given.get(odd[0])}, but the request's network has "
            f"{shapes.get(odd[0])}"
        )


def _sizes_of(model: Family) -> Iterator[int]:
    """Yield every integer that describes a network, at any depth of its settings."""
    rest = [to_plain(model)]
    while rest:
        match rest.pop():
            case dict(inside):
                rest += inside.values()
            case list(inside):
                rest += inside
            case int(size):
                yield size


def _plan(step: Step, request: ProgramRequest) -> MemoryPlan:
    # Measured: a network that takes 237 MB takes 250 MB with recomputed activations.
    planned = step
    if isinstance(request, TrainRequest) and request.recompute:
        planned = training_step_of(replace(request, recompute=False))
    return plan_torch(step, trace(planned, {}))


def plan_torch(step: Step, graph: fx.GraphModule) -> MemoryPlan:
    """Plan a step.

    Args:
        step: the step that is run.
        graph: of the step with all activations kept, in PyTorch's own operators.
    """
    activation_bytes = activation_peak_bytes(graph)
    parameter_bytes = value_bytes(value for value in step.inputs if value.role == "parameter")
    held_bytes = optimiser_bytes(step)
    return MemoryPlan(
        weights_bytes=weights_bytes(step),
        optimiser_bytes=held_bytes,
        fed_bytes=fed_bytes(step),
        activation_bytes=activation_bytes,
        workspace_bytes=int(
            ACTIVATION_FRACTION * activation_bytes
            + PARAMETER_FRACTION * parameter_bytes
            + OPTIMISER_FRACTION * held_bytes
        ),
        runtime_bytes=BASE_BYTES + sum(map(operator_bytes, graph.graph.nodes)),
    )


def operator_bytes(node: fx.Node) -> int:
    """Return what PyTorch takes for a node of a step, besides the tensors that it returns."""
    own_bytes = _OPERATOR_BYTES if node.op == "call_function" else 0
    return own_bytes + (_CONVOLUTION_BYTES if node.target is torch.ops.aten.convolution.default else 0)
