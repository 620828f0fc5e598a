"""Exports 8-bit inference models, and compares them with their float32 originals."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subfleet.elastic.building import build_module, network_of
from subfleet.export.programs import export_inference_model
from subfleet.export.quantisation.quantisers import QUANTISERS
from subfleet.export.requests import InferRequest
from subfleet.export.targets import find_target
from subfleet.export.targets.base import Target
from subfleet.export.tools import as_export_errors
from subfleet.protocol.errors import ExportError
from subfleet.tasks import Dataset

MOST_SAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisationSamples:
    """Samples like the model's future inputs: one half sets the ranges of activations, the other tests the result.

    Attributes:
        ranges: inputs (count, *sample shape) for the quantiser.
        inputs: inputs of the test.
        labels: their classes.
        sha256: content id of all of them.
    """

    ranges: npt.NDArray[np.generic]
    inputs: npt.NDArray[np.generic]
    labels: npt.NDArray[np.generic]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisationReport:
    """The accuracy of 8-bit integers on samples that were not used to make the model.

    Attributes:
        sample_count: number of samples.
        accuracy: of the quantised model.
        float_accuracy: of the same model in float32.
        agreement: fraction of samples for which both predict the same class.
    """

    sample_count: int
    accuracy: float
    float_accuracy: float
    agreement: float


def samples_of(dataset: Dataset) -> QuantisationSamples:
    """Split the first samples of a data set: every second one for the ranges, the others for the test.

    Raises:
        ExportError: there are fewer than two samples, or the labels are not classes.
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


_INPUT = "input"


def export_quantised_model(
    request: InferRequest, state: Mapping[str, Tensor], samples: QuantisationSamples
) -> tuple[bytes, QuantisationReport]:
    """Export an inference model with its weights as 8-bit integers.

    Args:
        request: what to export; its `quantisation` is not "none".
        state: the submodel's own tensors, by name.
        samples: the samples that the request names.

    Raises:
        ConfigError: the network or the submodel is not valid.
        ExportError: the state or the samples do not fit, or a tool rejects the model.
    """
    if samples.sha256 != request.samples_sha256:
        raise ExportError("the quantisation samples are not the request's; pass the data that it was made with")
    if samples.inputs.shape[1:] != request.model.input_shape:
        raise ExportError(
            f"the quantisation samples are of the shape {samples.inputs.shape[1:]}, but the model takes "
            f"{request.model.input_shape}; use data of that shape"
        )
    if request.target not in QUANTISERS:
        raise ExportError(f"target {request.target!r} has no 8-bit models, but {sorted(QUANTISERS)} have; use another")
    plain = replace(request, quantisation="none", samples_sha256="")
    float_body, _ = export_inference_model(plain, state)
    module = build_module(network_of(request.model), request.architecture)
    module.load_state_dict(dict(state))
    with as_export_errors("the model cannot be quantised", "deploy it in float32"):
        quantise = QUANTISERS[request.target]
        body = quantise(module.eval(), float_body, request.quantisation, samples.ranges, request.notes)
    return body, judge(find_target(request.target), float_body, body, _INPUT, samples)
