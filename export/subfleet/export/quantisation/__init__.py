"""Inference models in 8-bit integers, by target, and what that costs in accuracy."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from torch import nn

from subfleet.export.quantisation.executorch import quantise_executorch
from subfleet.export.quantisation.onnx import quantise_onnx

__all__ = ["QUANTISERS", "Quantiser"]

Quantiser = Callable[[nn.Module, bytes, str, npt.NDArray[np.generic], Mapping[str, str]], bytes]
"""A module with its weights, its float32 model file, "dynamic" or "static", samples, and notes, to the 8-bit file."""

QUANTISERS: Mapping[str, Quantiser] = MappingProxyType(
    {
        "onnx": lambda _module, body, mode, samples, notes: quantise_onnx(body, mode, samples, notes),
        "executorch": lambda module, _body, mode, samples, notes: quantise_executorch(module, mode, samples, notes),
    }
)
