"""Checks that a network computes each sample of a batch separately, so that micro-batches add up to their batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from subfleet.export.steps.reference import TrainingReference
from subfleet.export.steps.step import Step
from subfleet.protocol.errors import ExportError

_ALIKE = 1e-7
"""Relative tolerance of sums in double precision."""
_IN_PARTS = "micro-batches would not add up to their batch", "set micro_batch_size = 0"
_FILLED_UP = (
    "the padding of an incomplete batch would change the result",
    "for a norm use nn.BatchNorm1d or nn.BatchNorm2d, which ignore it",
)
_BOTH, _FIRST, _SECOND = (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)


def check_samples_apart(probe: Step) -> None:
    """Check that two samples together give the sum of their separate results.

    Args:
        probe: a step of two samples that sums gradients, for the network to be trained in micro-batches.

    Raises:
        ExportError: they do not; the message names the layer that mixes them.
    """
    drawn = probe.example(torch.Generator().manual_seed(0), apply=False)
    both, first, second = (_loss_and_gradients(probe, drawn, mask) for mask in (_BOTH, _FIRST, _SECOND))
    usual = float(torch.stack([first_alone.norm() for first_alone in both]).max())
    for together, first_alone, second_alone in zip(both, first, second, strict=True):
        apart = (first_alone + second_alone - together).norm()
        if not apart <= _ALIKE * max(usual, float(together.norm())):
            raise ExportError(_describe_mixing(_find_mixing_layer(probe, drawn, _BOTH), *_IN_PARTS))


def check_padding(step: Step) -> None:
    """Check that the padding of a batch does not affect a step of PyTorch's own operators.

    Args:
        step: a training step.

    Raises:
        ExportError: it does, for example because samples are mixed; the message names the layer.
    """
    count = step.inputs[0].shape[0]
    if count < 2:
        return
    drawn = step.example(torch.Generator().manual_seed(0))
    whole, single_sample = (1.0,) * count, (1.0, *(0.0,) * (count - 1))
    if _matches_reference(step, drawn, whole) and not _matches_reference(step, drawn, single_sample):
        raise ExportError(_describe_mixing(_find_mixing_layer(step, drawn, whole), *_FILLED_UP))


def _matches_reference(step: Step, drawn: Sequence[Tensor], mask: Sequence[float]) -> bool:
    """Return whether a step agrees with its reference in double precision."""
    tensors = _double_inputs(step, drawn, mask)
    triples = zip(step.outputs, step.run(*tensors), step.reference(*tensors), strict=True)
    compared = ((result, right) for value, result, right in triples if value.role in {"loss", "parameter", "gradient"})
    return all(bool((result - right).norm() <= _ALIKE * (1 + right.norm())) for result, right in compared)


def _double_inputs(probe: Step, drawn: Sequence[Tensor], mask: Sequence[float]) -> list[Tensor]:
    tensors = []
    for value, tensor in zip(probe.inputs, drawn, strict=True):
        own = torch.tensor(mask) if value.role == "sample_mask" else tensor
        own = torch.zeros_like(own) if value.role == "gradient" else own
        tensors.append(own.double() if own.is_floating_point() else own)
    return tensors


def _loss_and_gradients(probe: Step, drawn: Sequence[Tensor], mask: Sequence[float]) -> list[Tensor]:
    """Return the reference's loss and gradients."""
    results = probe.reference(*_double_inputs(probe, drawn, mask))
    return [result for value, result in zip(probe.outputs, results, strict=True) if value.role in {"loss", "gradient"}]


def _find_mixing_layer(step: Step, drawn: Sequence[Tensor], whole: Sequence[float]) -> str:
    """Return the first layer with outputs that depend on other samples; empty if it is unknown."""
    reference = step.reference
    if not isinstance(reference, TrainingReference):
        return ""
    alone_mask = (1.0, *(0.0 for _ in whole[1:]))
    both, alone = (reference.layer_outputs(*_double_inputs(step, drawn, mask)) for mask in (whole, alone_mask))
    for (name, batch_output), (_, alone_output) in zip(both, alone, strict=False):
        if alone_output.shape[:1] != (1,) or batch_output.shape[:1] != (len(whole),):
            continue
        if not torch.allclose(batch_output[:1], alone_output, rtol=1e-9, atol=1e-12):
            return name
    return ""


def _describe_mixing(layer: str, so_that: str, remedy: str) -> str:
    culprit = f"layer {layer!r}" if layer else "the network"
    return (
        f"{culprit} mixes the samples of a batch, as a norm or a softmax over dimension 0 does, so {so_that}; "
        f"{remedy}, or compute each sample separately"
    )
