"""Writes inference models with 8-bit integer weights, by target."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from subfleet.export.targets.executorch_program import constant_methods
from subfleet.export.targets.onnx import add_notes
from subfleet.export.tools import quiet
from subfleet.protocol.silence import import_silently

_PRODUCTS = ["Conv", "Gemm", "MatMul"]
"""Operators that are quantised. Norms and activations between them stay float32: that costs little and keeps
accuracy."""
_BATCH_SIZE = 16


def _quantise_onnx(
    _module: nn.Module, body: bytes, mode: str, samples: npt.NDArray[np.generic], notes: Mapping[str, str]
) -> bytes:
    """Quantise an .onnx model, by ONNX Runtime's own quantiser.

    Args:
        _module: not used.
        body: the float32 model, with one input.
        mode: "dynamic" determines the range of activations in every run; "static" fixes it from the samples.
        samples: inputs (count, *sample shape) like the model's future inputs; only "static" reads them.
        notes: texts that the model carries, by name.

    Returns:
        The model with 8-bit weights, in the same operator set.
    """
    quantization = import_silently("onnxruntime.quantization")
    signed = quantization.QuantType.QInt8

    with tempfile.TemporaryDirectory() as folder, quiet():
        folded, quantised = Path(folder) / "folded.onnx", Path(folder) / "quantised.onnx"
        _fold_constants(body, folded)
        if mode == "dynamic":
            quantization.quantize_dynamic(folded, quantised, op_types_to_quantize=_PRODUCTS, weight_type=signed)
        else:
            quantization.quantize_static(
                folded,
                quantised,
                _reader(samples, _input_name(folded)),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=_PRODUCTS,
                per_channel=True,
                activation_type=signed,
                weight_type=signed,
            )
        return add_notes(quantised.read_bytes(), notes)


def _fold_constants(body: bytes, path: Path) -> None:
    """Write the model with everything folded that only depends on weights: the quantiser looks for constants."""
    onnxruntime = import_silently("onnxruntime")

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])


def _input_name(path: Path) -> str:
    import onnx

    return str(onnx.load(path).graph.input[0].name)


def _reader(samples: npt.NDArray[np.generic], name: str) -> Any:
    """Wrap the samples as the quantiser needs them."""
    base: Any = import_silently("onnxruntime.quantization").CalibrationDataReader  # untyped

    class Reader(base):  # type: ignore[misc]
        """Hands out batch after batch."""

        def __init__(self) -> None:
            self._batches = iter(np.array_split(samples, max(len(samples) // _BATCH_SIZE, 1)))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self._batches, None)
            return None if batch is None else {name: batch}

    return Reader()


def _quantise_executorch(
    module: nn.Module, _body: bytes, mode: str, samples: npt.NDArray[np.generic], notes: Mapping[str, str]
) -> bytes:
    """Write a module as a .pte model with 8-bit weights, for one sample at a time.

    It uses torchao's quantiser and XNNPACK's rules.

    Args:
        module: in evaluation mode, with its weights.
        _body: not used.
        mode: "dynamic" quantises the inputs of linear layers in every run; "static" also those of convolutions, with
            ranges from the samples.
        samples: inputs (count, *sample shape) like the model's future inputs.
        notes: texts that the model carries, by name.

    Returns:
        The program, delegated to XNNPACK.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    inputs = torch.from_numpy(np.ascontiguousarray(samples))
    example = (inputs[:1],)
    settings = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=mode == "dynamic")
    with quiet(), torch.no_grad():
        graph: Any = torch.export.export(module, example).module()
        prepared = prepare_pt2e(graph, XNNPACKQuantizer().set_global(settings))
        for index in range(len(inputs)):  # shows the quantiser the ranges of the activations
            prepared(inputs[index : index + 1])
        exported = torch.export.export(convert_pt2e(prepared), example)
        edge = to_edge_transform_and_lower(
            exported, partitioner=[XnnpackPartitioner()], constant_methods=dict(constant_methods(notes)) or None
        )
        program = edge.to_executorch()
    return bytes(program.buffer)


Quantiser = Callable[[nn.Module, bytes, str, npt.NDArray[np.generic], Mapping[str, str]], bytes]
"""(module with its weights, its float32 model file, "dynamic" or "static", samples, notes) to the 8-bit file."""

QUANTISERS: Mapping[str, Quantiser] = MappingProxyType({"onnx": _quantise_onnx, "executorch": _quantise_executorch})
