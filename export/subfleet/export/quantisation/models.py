"""Requests to 8-bit inference models, judged beside their float32 originals."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from subfleet.elastic.building import build_module, network_of
from subfleet.export.programs import export_inference_model
from subfleet.export.quantisation import QUANTISERS
from subfleet.export.quantisation.report import QuantisationReport, QuantisationSamples, judge
from subfleet.export.requests import InferRequest
from subfleet.export.targets import find_target
from subfleet.protocol.errors import ExportError

__all__ = ["export_quantised_model"]

_INPUT = "input"


def export_quantised_model(
    request: InferRequest, state: Mapping[str, Tensor], samples: QuantisationSamples
) -> tuple[bytes, QuantisationReport]:
    """Write an inference model with its weights as 8-bit integers inside.

    Args:
        request: what to write; its `quantisation` is not "none".
        state: the submodel's own tensors, by name.
        samples: the samples that the request names.

    Raises:
        ConfigError: the network or the submodel is not valid.
        ExportError: the state or the samples do not fit, or a tool refuses the model.
    """
    if samples.sha256 != request.samples_sha256:
        raise ExportError("the quantisation samples are not those of the request; name the data that it was made for")
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
    try:
        quantise = QUANTISERS[request.target]
        body = quantise(module.eval(), float_body, request.quantisation, samples.ranges, request.notes)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"the model cannot be quantised ({type(error).__name__}: {reason:.300}); deploy it in float32"
        ) from error
    return body, judge(find_target(request.target), float_body, body, _INPUT, samples)
