"""Steps without gradients: evaluation and inference."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subfleet.export.layers import LayerContext
from subfleet.export.steps.layout import label_of, mask_of, scalar, weights_of
from subfleet.export.steps.module_calls import call_with_state, prepare_module, run_exits, state_of
from subfleet.export.steps.objectives import OBJECTIVES, total
from subfleet.export.steps.reference import EvaluationReference, InferenceReference
from subfleet.export.steps.shape_run import run_on_shapes
from subfleet.export.steps.state_snapshot import StateSnapshot
from subfleet.export.steps.step import SampleSpec, Step, StepInputs
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings


def evaluation_step(module: nn.Module, sample: SampleSpec, *, batch_size: int, objective: ObjectiveSettings) -> Step:
    """Build the evaluation step of a module: (batch, parameters, buffers) -> (loss, correct, count, logits).

    Every layer is in evaluation mode: nothing is dropped, BatchNorm uses its running statistics, and nothing changes.
    If a network has several exits, the last one counts, as in inference. The loss is the mean over the labels that
    count.

    Args:
        module: as in `training_step`; it is not changed.
        sample: the input of one sample.
        batch_size: samples of one step; a smaller batch is padded, and masked by the step's sample mask.
        objective: a plain objective.

    Raises:
        ExportError: the objective is not plain, the module cannot be run on such inputs, its logits do not fit the
            objective, its state is not float32, or a layer depends on the batch.
    """
    if objective != objective.plain:
        raise ExportError(
            f"the objective of an evaluation is {objective}, but must be a plain one of {sorted(OBJECTIVES)}; use "
            "objective.plain"
        )
    given = sample.value(batch_size)
    logits = run_on_shapes(module, given, training=False).output_shapes[-1]
    if logits[:1] != (batch_size,):
        raise ExportError(
            f"the network's output is of the shape {logits}, but its first size must be the batch's {batch_size}"
        )
    inputs = (given, label_of(objective, logits), mask_of(batch_size), *weights_of(module))
    outputs = (
        scalar("loss", "loss"),
        scalar("correct", "correct"),
        scalar("count", "count"),
        ValueInfo(name="logits", dtype="F32", shape=logits, role="logits"),
    )
    return Step(
        run=_EvaluationRun(module=module, objective=objective, inputs=inputs),
        reference=EvaluationReference(module=module, objective=objective, inputs=inputs),
        inputs=inputs,
        outputs=outputs,
        class_count=inputs[1].limit,
        padded_labels=objective.padded,
        carried=state_of(module),
        held=StateSnapshot(module).tensors,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluationRun:
    """The pure function of an evaluation step, in the order of the step's inputs and outputs."""

    module: nn.Module
    objective: ObjectiveSettings
    inputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = StepInputs(self.inputs, tensors)
        state: Mapping[str, Tensor] = given.by_tensor("parameter") | {
            name: tensor.clone()
            for name, tensor in given.by_tensor("buffer").items()  # the module may change its buffers in place
        }
        with prepare_module(self.module, LayerContext(None), training=False), torch.no_grad():
            logits = call_with_state(self.module, state, lambda: run_exits(self.module, given.single("input")))[-1]
            rule, labels = OBJECTIVES[self.objective.name], given.single("label")
            counted = rule.count_mask(labels, given.single("sample_mask"))
            count = total(counted)
            loss = total(rule.losses(self.objective, logits, labels) * counted) / count.clamp(min=1.0)
            correct = total(rule.correct(logits, labels) * counted)
        return loss, correct, count, logits


def inference_step(module: nn.Module, sample: SampleSpec, *, batch_size: int) -> Step:
    """Build the inference step of a module: (inputs, parameters, buffers) to the logits of its last exit.

    Every layer is in evaluation mode: nothing is dropped, BatchNorm uses its running statistics.

    Args:
        module: as in `training_step`; it is not changed.
        sample: the input of one sample.
        batch_size: of the step that is traced.

    Raises:
        ExportError: the module cannot be run on such inputs, its state is not float32, or a layer depends on the batch.
    """
    given = sample.value(batch_size)
    shapes = run_on_shapes(module, given, training=False)
    outputs = shapes.output_shapes
    weights = weights_of(module)

    def run(inputs: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        context = LayerContext(None)
        with prepare_module(module, context, training=False), torch.no_grad():
            state = dict(zip((value.tensor for value in weights), tensors, strict=True))
            # The module may change its buffers in place.
            state |= {value.tensor: state[value.tensor].clone() for value in weights if value.role == "buffer"}
            logits = call_with_state(module, state, lambda: run_exits(module, inputs))
        return (logits[-1],)

    inputs = (given, *weights)
    return Step(
        run=run,
        reference=InferenceReference(module=module, inputs=inputs),
        inputs=inputs,
        outputs=(ValueInfo(name="logits", dtype="F32", shape=outputs[-1], role="logits"),),
        class_count=outputs[-1][-1],
        carried=state_of(module),
        held=StateSnapshot(module).tensors,
    )
