"""From requests to verified programs: trace, lower, write, run once, compare with PyTorch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from subfleet.elastic.building import build_module, network_of
from subfleet.export.chains.programs import write_chain
from subfleet.export.chains.supernets import is_chained
from subfleet.export.memory.step_bytes import add_gaps
from subfleet.export.preflight import explain_failure
from subfleet.export.request_steps import sample_of, step_of
from subfleet.export.requests import InferRequest, ProgramRequest
from subfleet.export.steps import Step, inference_step
from subfleet.export.steps.mixing import check_padding
from subfleet.export.targets import find_target
from subfleet.export.targets.base import Target
from subfleet.export.targets.torch import TARGET as TORCH
from subfleet.export.targets.torch import TorchModel, write_torch_model, write_torch_program
from subfleet.export.tools import as_export_errors
from subfleet.export.tracing import trace
from subfleet.export.verification.distances import Run
from subfleet.export.verification.verifying import (
    Verified,
    seeded_generator,
    verify_evaluation,
    verify_inference,
    verify_training,
)
from subfleet.export.versions import tool_versions
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import Program, ProgramManifest

logger = logging.getLogger(__name__)


def export_program(request: ProgramRequest) -> Program:
    """Export the training or evaluation program of a submodel and verify it.

    Raises:
        ConfigError: the network or the submodel is not valid, or the student is not part of it.
        ExportError: a layer cannot be trained or run, with its name, the reason and the remedy; or the program differs
            from PyTorch.
    """
    program_id = request.program_id  # first: it fails if the target's tools are missing
    if is_chained(request):
        return write_chain(request)
    if request.target == TORCH:
        return write_torch_program(request)
    step = step_of(request)
    try:
        return write_program(step, target=request.target, program_id=program_id)
    except ExportError as error:
        network = network_of(request.model)
        module, sample = build_module(network, request.architecture), sample_of(network)
        raise explain_failure(error, module, sample, target=request.target, batch_size=request.batch_size) from error


@as_export_errors()
def write_program(step: Step, *, target: str, program_id: str) -> Program:
    """Trace, lower and write a step of training or evaluation, and verify it.

    Args:
        step: the step, made from any module.
        target: a name in `subfleet.export.targets.TARGETS`.
        program_id: identifies what the step was made from; it also seeds the numbers of the verification.

    Raises:
        ExportError: an operator cannot be written, or the program differs from PyTorch.
        MissingExtraError: one of the target's tools is not installed.
    """
    versions = tool_versions(target)
    writer = find_target(target)
    trains = not any(value.role == "logits" for value in step.outputs)
    lowerings = writer.lowerings if trains else writer.inference_lowerings
    written = writer.write_training(trace(step, lowerings), step)
    run, generator = _runner(writer, written.body, step), seeded_generator(program_id)
    if trains:
        try:
            verified = verify_training(run, step, generator)
        except ExportError:
            check_padding(step)  # its error is more specific
            raise
        _warn_unverifiable(step, verified)
        max_abs_diff = verified.max_abs_diff
    else:
        max_abs_diff = verify_evaluation(run, step, generator)
    manifest = ProgramManifest(
        program_id=program_id,
        target=target,
        purpose="train" if trains else "evaluate",
        batch_size=step.inputs[0].shape[0],
        inputs=step.inputs,
        outputs=step.outputs,
        memory=add_gaps(written.memory, target),
        max_abs_diff=max_abs_diff,
        versions=versions,
        operators=written.operators,
    )
    return Program(manifest=manifest, body=written.body)


def _warn_unverifiable(step: Step, verified: Verified) -> None:
    changes = [value.name for value in step.outputs if value.role == "parameter"]
    hidden = sum(name in verified.unseen for name in changes)
    if 2 * hidden > len(changes):
        logger.warning(
            "%d of %d parameters could not be verified: on random weights, PyTorch's own gradient in single "
            "precision is off by a tenth or more; train with care, or use a shallower network",
            hidden,
            len(changes),
        )


def export_inference_model(request: InferRequest, state: Mapping[str, Tensor]) -> tuple[bytes, float]:
    """Export an inference model that contains its weights, and verify it.

    An .onnx model takes batches of any size; a .pte model takes one sample at a time.

    Args:
        request: what to export.
        state: the submodel's own tensors, by name.

    Returns:
        The model file, and its largest absolute difference from PyTorch.

    Raises:
        ConfigError: the network or the submodel is not valid.
        ExportError: the state does not fit the submodel, an operator cannot be written, or the model differs from
            PyTorch.
    """
    network = network_of(request.model)
    module = build_module(network, request.architecture)
    if request.target == TORCH:
        _check_weights({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}, state)
        described = TorchModel(
            model=request.model,
            architecture=request.architecture,
            classes=request.classes,
            objective=request.objective,
            transform=request.transform,
        )
        return write_torch_model(described, state), 0.0
    batch_size = find_target(request.target).inference_batch_size
    step = inference_step(module, sample_of(network), batch_size=batch_size)
    return write_inference_model(step, state, target=request.target, notes=request.notes)


@as_export_errors()
def write_inference_model(
    step: Step, weights: Mapping[str, Tensor], *, target: str, notes: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, float]:
    """Trace, lower and write an inference step together with its weights, and verify it.

    Args:
        step: of any module, with the target's `inference_batch_size`. The model takes batches of any size if target and
            network allow it, otherwise batches of the step's size, or single samples.
        weights: parameters and buffers, by tensor name; nothing else.
        target: a name in `subfleet.export.targets.TARGETS`.
        notes: texts by name that the model carries; see `subfleet.protocol.model_notes`.

    Returns:
        The model file, and its largest absolute difference from PyTorch.

    Raises:
        ExportError: the weights do not fit the step, an operator cannot be written, or the model differs from PyTorch.
    """
    writer = find_target(target)
    shapes = {value.tensor: value.shape for value in step.inputs[1:]}
    _check_weights(shapes, weights)
    ordered = [weights[name].detach() for name in shapes]
    graph = trace(step, writer.inference_lowerings)
    if writer.any_inference_batch:
        body = writer.write_inference(graph, step, ordered, any_batch=True, notes=notes)
        if _takes_any_batch(writer, body, step):
            return body, _verify_model(writer, body, step, ordered)
        step = _single_sample_step(step)
        graph = trace(step, writer.inference_lowerings)
    body = writer.write_inference(graph, step, ordered, any_batch=False, notes=notes)
    return body, _verify_model(writer, body, step, ordered)


def _runner(writer: Target, body: bytes, step: Step) -> Run:
    return lambda example: writer.run(body, dict(zip((value.name for value in step.inputs), example, strict=True)))


def _verify_model(writer: Target, body: bytes, step: Step, weights: Sequence[Tensor]) -> float:
    inputs = step.example(seeded_generator(str(step.inputs)))[0]
    return verify_inference(lambda given: writer.run(body, {step.inputs[0].name: given[0]}), step, (inputs, *weights))


def _takes_any_batch(writer: Target, body: bytes, step: Step) -> bool:
    """Return whether three times the batch gives three times the logits; a tensor of the batch's size prevents that."""
    inputs = step.example(seeded_generator(str(step.inputs)))[0]
    try:
        once, thrice = (writer.run(body, {step.inputs[0].name: torch.cat([inputs] * times)})[0] for times in (1, 3))
    except Exception:  # noqa: BLE001 - runtimes' errors have no common base
        return False
    return thrice.shape[0] == 3 * inputs.shape[0] and torch.allclose(torch.cat([once] * 3), thrice, atol=_SAME_LOGITS)


_SAME_LOGITS = 1e-4
"""Largest difference of a sample's logits between batches of different sizes."""


def _single_sample_step(step: Step) -> Step:
    """Return an inference step for one sample at a time."""
    (given, *weights), (logits,) = step.inputs, step.outputs
    return replace(
        step,
        inputs=(replace(given, shape=(1, *given.shape[1:])), *weights),
        outputs=(replace(logits, shape=(1, *logits.shape[1:])),),
    )


def _check_weights(shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != given:
        odd = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ExportError(
            f"tensor {odd[0]!r} has the shape {given.get(odd[0])}, but the submodel needs {shapes.get(odd[0])}; "
            "extract the submodel's own tensors first"
        )
