"""The samples that a quantised model is made and judged with, and the judgement."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from subfleet.export.targets.base import Target
from subfleet.protocol.errors import ExportError
from subfleet.tasks import Dataset

__all__ = ["QuantisationReport", "QuantisationSamples", "judge", "samples_of"]

MOST_SAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisationSamples:
    """Samples such as the model will meet: one half sets the ranges of activations, the other judges the result.

    Attributes:
        ranges: inputs (count, *sample shape) for the quantiser.
        inputs: inputs for the judgement.
        labels: their classes.
        sha256: content id of all of them.
    """

    ranges: npt.NDArray[np.generic]
    inputs: npt.NDArray[np.generic]
    labels: npt.NDArray[np.generic]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisationReport:
    """What 8-bit integers cost on samples that took no part in making the model.

    Attributes:
        sample_count: how many they were.
        accuracy: of the quantised model.
        float_accuracy: of the same model in float32.
        agreement: fraction of samples for which both predict the same class.
    """

    sample_count: int
    accuracy: float
    float_accuracy: float
    agreement: float


def samples_of(dataset: Dataset) -> QuantisationSamples:
    """Every second of the first samples of a data set for the ranges, the others for the judgement.

    Raises:
        ExportError: it holds fewer than two samples, or its labels are no classes.
    """
    if len(dataset) < 2 or dataset.labels.ndim != 1 or not np.issubdtype(dataset.labels.dtype, np.integer):
        raise ExportError(
            f"the quantisation data hold {len(dataset)} samples with labels of the shape {dataset.labels.shape}, type "
            f"{dataset.labels.dtype}, but must hold two or more, each with a class"
        )
    inputs, labels = dataset.inputs[:MOST_SAMPLES], dataset.labels[:MOST_SAMPLES]
    digest = hashlib.sha256(str((inputs.shape, inputs.dtype)).encode())
    digest.update(np.ascontiguousarray(inputs).tobytes() + np.ascontiguousarray(labels).tobytes())
    return QuantisationSamples(ranges=inputs[::2], inputs=inputs[1::2], labels=labels[1::2], sha256=digest.hexdigest())


def judge(
    target: Target, float_body: bytes, body: bytes, input_name: str, samples: QuantisationSamples
) -> QuantisationReport:
    """Compare a quantised model with its float32 original."""
    before = _classes(target, float_body, input_name, samples)
    after = _classes(target, body, input_name, samples)
    return QuantisationReport(
        sample_count=len(samples.labels),
        accuracy=float((after == samples.labels).mean()),
        float_accuracy=float((before == samples.labels).mean()),
        agreement=float((before == after).mean()),
    )


def _classes(target: Target, body: bytes, input_name: str, samples: QuantisationSamples) -> npt.NDArray[np.int64]:
    inputs = torch.from_numpy(np.ascontiguousarray(samples.inputs))
    size = len(inputs) if target.any_inference_batch else target.inference_batch_size
    batches = [inputs[first : first + size] for first in range(0, len(inputs), size)]
    batches_of_classes = [target.run(body, {input_name: batch})[0].argmax(dim=-1) for batch in batches]
    return torch.cat(batches_of_classes).numpy()
