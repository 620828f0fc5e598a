"""The inference step of a module."""

import torch
from torch import Tensor, nn

from subfleet.export.layers import LayerContext
from subfleet.export.steps.first_run import run_on_shapes
from subfleet.export.steps.holders import StateSnapshot
from subfleet.export.steps.layout import weights_of
from subfleet.export.steps.module_state import call_with_state, state_of
from subfleet.export.steps.network_call import prepare_module, run_exits
from subfleet.export.steps.reference import InferenceReference
from subfleet.export.steps.values import SampleSpec, Step
from subfleet.protocol.programs import ValueInfo

__all__ = ["inference_step"]


def inference_step(module: nn.Module, sample: SampleSpec, *, batch_size: int) -> Step:
    """Make the inference step of a module: (inputs, parameters, buffers) to logits, of the last exit where it has many.

    Every layer is in its evaluation mode: nothing is dropped, BatchNorm uses its running statistics.

    Args:
        module: as in `training_step`; it is left as it is.
        sample: the input of one sample.
        batch_size: of the step that is traced.

    Raises:
        ExportError: the module cannot be run on such inputs, its state is of another type than float32, or a layer
            depends on the batch.
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
