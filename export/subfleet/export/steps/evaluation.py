"""The evaluation step of a module: how good it is on a batch, without a gradient.

(batch, parameters, buffers) -> (loss, correct, count, logits)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subfleet.export.layers import LayerContext
from subfleet.export.steps.first_run import first_run
from subfleet.export.steps.given import Given
from subfleet.export.steps.holders import Holders
from subfleet.export.steps.layout import label_of, mask_of, scalar, weights_of
from subfleet.export.steps.module_state import state_of, within
from subfleet.export.steps.network_call import exits_of, prepared
from subfleet.export.steps.objectives import OBJECTIVES, total
from subfleet.export.steps.reference import EvaluationReference
from subfleet.export.steps.values import SampleSpec, Step
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo
from subfleet.protocol.training import ObjectiveSettings

__all__ = ["evaluation_step"]


def evaluation_step(module: nn.Module, sample: SampleSpec, *, batch_size: int, objective: ObjectiveSettings) -> Step:
    """Make the evaluation step of a module.

    Every layer is in its evaluation mode: nothing is dropped, BatchNorm uses its running statistics, and nothing is
    changed. Of a network with several exits the last one counts, as in inference. The loss is the mean over the labels
    that count.

    Args:
        module: as in `training_step`; it is left as it is.
        sample: the input of one sample.
        batch_size: samples of one step; a smaller batch is padded, and masked by the step's sample mask.
        objective: what is told; a plain one.

    Raises:
        ExportError: the objective is not plain, the module cannot be run on such inputs, its logits do not
            fit the objective, its state is of another type than float32, or a layer depends on the batch.
    """
    if objective != objective.plain:
        raise ExportError(
            f"the objective of an evaluation is {objective}, but must be a plain one of {sorted(OBJECTIVES)}; use "
            "objective.plain"
        )
    given = sample.value(batch_size)
    logits = first_run(module, given, training=False).output_shapes[-1]
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
        held=Holders(module).tensors,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluationRun:
    """The pure function of an evaluation step, in the order of the step's inputs and outputs."""

    module: nn.Module
    objective: ObjectiveSettings
    inputs: tuple[ValueInfo, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = Given(self.inputs, tensors)
        state: Mapping[str, Tensor] = given.named("parameter") | {
            name: tensor.clone()
            for name, tensor in given.named("buffer").items()  # the module may change them in place
        }
        with prepared(self.module, LayerContext(None), training=False), torch.no_grad():
            logits = within(self.module, state, lambda: exits_of(self.module, given.one("input")))[-1]
            rule, labels = OBJECTIVES[self.objective.name], given.one("label")
            counted = rule.counted(labels, given.one("sample_mask"))
            count = total(counted)
            loss = total(rule.losses(self.objective, logits, labels) * counted) / count.clamp(min=1.0)
            correct = total(rule.right(logits, labels) * counted)
        return loss, correct, count, logits
