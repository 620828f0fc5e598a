"""Steps without gradients: evaluation and inference."""

import torch
from torch import Tensor, nn

from subfleet.export.layers import LayerContext
from subfleet.export.steps.layout import label_of, mask_of, metric_values, weights_of
from subfleet.export.steps.module_calls import call_with_state, prepare_module, run_exits, state_of
from subfleet.export.steps.objectives import OBJECTIVES, total
from subfleet.export.steps.reference import ForwardReference
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
    batch_input = sample.value(batch_size)
    logits = run_on_shapes(module, batch_input, training=False).output_shapes[-1]
    if logits[:1] != (batch_size,):
        raise ExportError(
            f"the network's output is of the shape {logits}, but its first size must be the batch's {batch_size}"
        )
    inputs = (batch_input, label_of(objective, logits), mask_of(batch_size), *weights_of(module))
    rule = OBJECTIVES[objective.name]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = StepInputs(inputs, tensors)
        logits, labels = _last_logits(module, values), values.single("label")
        counted = rule.count_mask(labels, values.single("sample_mask"))
        count = total(counted)
        loss = total(rule.losses(objective, logits, labels) * counted) / count.clamp(min=1.0)
        return loss, total(rule.correct(logits, labels) * counted), count, logits

    return Step(
        run=run,
        reference=ForwardReference(module=module, objective=objective, inputs=inputs),
        inputs=inputs,
        outputs=(*metric_values(objective), _logits_value(logits)),
        padded_labels=objective.padded,
        carried=state_of(module),
        held=StateSnapshot(module).tensors,
    )


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
    batch_input = sample.value(batch_size)
    logits = run_on_shapes(module, batch_input, training=False).output_shapes[-1]
    inputs = (batch_input, *weights_of(module))
    return Step(
        run=lambda *tensors: (_last_logits(module, StepInputs(inputs, tensors)),),
        reference=ForwardReference(module=module, objective=None, inputs=inputs),
        inputs=inputs,
        outputs=(_logits_value(logits),),
        carried=state_of(module),
        held=StateSnapshot(module).tensors,
    )


def _logits_value(shape: tuple[int, ...]) -> ValueInfo:
    return ValueInfo(name="logits", dtype="F32", shape=shape, role="logits")


def _last_logits(module: nn.Module, step_inputs: StepInputs) -> Tensor:
    """Run a module in evaluation mode, and return the logits of its last exit."""
    state = step_inputs.by_tensor("parameter")
    state |= {
        name: tensor.clone() for name, tensor in step_inputs.by_tensor("buffer").items()
    }  # may be changed in place
    with prepare_module(module, LayerContext(None), training=False), torch.no_grad():
        return call_with_state(module, state, lambda: run_exits(module, step_inputs.single("input")))[-1]
