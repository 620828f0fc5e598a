"""Requests to verified programs: trace, lower, write, run once, compare with PyTorch."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from subfleet.elastic.families import build_module, network_of
from subfleet.export.requests import InferRequest, TrainRequest
from subfleet.export.step import Step, inference_step, training_step
from subfleet.export.targets import target_named
from subfleet.export.targets.base import Target
from subfleet.export.tracing import trace
from subfleet.export.versions import tool_versions
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import Program, ProgramManifest

__all__ = ["TOLERANCE", "export_inference_model", "export_training_program"]

TOLERANCE = 1e-4
"""The largest absolute difference from PyTorch in double precision that a program may show on random inputs."""
_JUMPING = frozenset({"parameter", "optimiser_state"})
"""Roles of values that follow a gradient. It jumps where an activation's input rounds to the other side of 0, which
moves a few elements of a large tensor; so these may also pass by their relative distance as a whole, at `TOLERANCE`."""
_EAGER_FACTOR = 4.0
"""Where PyTorch's own single precision is further off, a program may be this many times as far as that."""


def export_training_program(request: TrainRequest) -> Program:
    """Write the training program of a subnet, and verify it.

    Raises:
        ConfigError: the network or the subnet is not valid.
        ExportError: an operator cannot be written, or the program differs from PyTorch.
    """
    target = target_named(request.target)
    program_id = request.program_id
    network = network_of(request.model)
    step = training_step(
        build_module(network, request.spec),
        request.model.input_shape,
        batch_size=request.batch_size,
        objective=request.objective,
        optimiser=request.optimiser,
    )
    written = target.write_training(trace(step, target.lowerings), step)
    difference = verify(target, written.body, step, _seeded_example(step, program_id))
    manifest = ProgramManifest(
        program_id=program_id,
        target=request.target,
        purpose="train",
        batch_size=request.batch_size,
        inputs=step.inputs,
        outputs=step.outputs,
        planned_peak_bytes=written.planned_peak_bytes,
        max_abs_diff=difference,
        versions=tool_versions(request.target),
    )
    return Program(manifest=manifest, body=written.body)


def export_inference_model(request: InferRequest, state: Mapping[str, Tensor]) -> tuple[bytes, float]:
    """Write an inference model with its weights inside, and verify it.

    An .onnx model takes batches of any size; a .pte model takes one sample at a time.

    Args:
        request: what to write.
        state: the subnet's own tensors, by name.

    Returns:
        The model file's bytes, and its largest absolute difference from PyTorch.

    Raises:
        ConfigError: the network or the subnet is not valid.
        ExportError: the state does not fit the subnet, an operator cannot be written, or the model differs
            from PyTorch.
    """
    target = target_named(request.target)
    module = build_module(network_of(request.model), request.spec)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if shapes != given:
        odd = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ExportError(
            f"tensor {odd[0]!r} has the shape {given.get(odd[0])}, but the subnet needs {shapes.get(odd[0])}; "
            "extract the subnet's own tensors first"
        )
    step = inference_step(module, request.model.input_shape, batch_size=target.inference_batch_size)
    weights = [state[name].detach() for name in shapes]
    body = target.write_inference(trace(step, target.inference_lowerings), step, weights)
    inputs = _seeded_example(step, request.program_id)[0]
    actual = target.run(body, {step.inputs[0].name: inputs})
    if target.any_inference_batch:
        # Samples do not meet in an inference model: thrice the batch gives thrice the logits.
        (thrice,) = target.run(body, {step.inputs[0].name: torch.cat([inputs] * 3)})
        if thrice.shape[0] != 3 * inputs.shape[0] or _distance(torch.cat([*actual] * 3), thrice) > TOLERANCE:
            raise ExportError("the inference model gives other logits in a larger batch; report it with the request")
    with torch.no_grad():
        return body, _largest_difference(step, (inputs, *weights), actual)


def verify(target: Target, body: bytes, step: Step, example: Sequence[Tensor]) -> float:
    """Run a program once beside PyTorch in double precision; the largest absolute difference.

    Raises:
        ExportError: it is above `TOLERANCE`, and above what PyTorch's own single precision explains; or shapes differ.
    """
    named = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
    return _largest_difference(step, example, target.run(body, named))


def _seeded_example(step: Step, program_id: str) -> tuple[Tensor, ...]:
    seed = int.from_bytes(hashlib.sha256(program_id.encode()).digest()[:4], "big")
    return step.example(torch.Generator().manual_seed(seed))


def _largest_difference(step: Step, example: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    exact = step.run(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in example))
    if len(exact) != len(actual):
        raise ExportError(f"the program gives {len(actual)} results, but must give {len(exact)}")
    worst = 0.0
    for value, right, eager, got in zip(step.outputs, exact, step.run(*example), actual, strict=True):
        if right.shape != got.shape:
            raise ExportError(f"the program's {value.name!r} is {tuple(got.shape)}, but must be {tuple(right.shape)}")
        difference, limit = _distance(right, got), max(TOLERANCE, _EAGER_FACTOR * _distance(right, eager))
        # Written so that NaN fails as well.
        if not (difference <= limit or (value.role in _JUMPING and _relative(right, got) <= TOLERANCE)):
            raise ExportError(
                f"the program's {value.name!r} differs from PyTorch by {difference:.1e}, but may by {limit:.0e} "
                "at most; nothing was written, report it with the request"
            )
        worst = max(worst, difference)
    return worst


def _relative(right: Tensor, other: Tensor) -> float:
    return float((right - other).norm() / right.norm())


def _distance(right: Tensor, other: Tensor) -> float:
    return float((right - other).abs().max()) if right.numel() else 0.0
