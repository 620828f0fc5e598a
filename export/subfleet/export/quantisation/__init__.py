"""Inference models in 8-bit integers, by target, and what that costs in accuracy."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from torch import nn

from subfleet.export.quantisation.executorch import quantise_executorch
from subfleet.export.quantisation.onnx import quantise_onnx

__all__ = ["QUANTISERS", "Quantiser"]

Quantiser = Callable[[nn.Module, bytes, str, npt.NDArray[np.generic], tuple[str, ...]], bytes]
"""A module with its weights, its float32 model file, "dynamic" or "static", samples, and names of the classes, to the
8-bit model file."""

QUANTISERS: Mapping[str, Quantiser] = MappingProxyType(
    {
        "onnx": lambda _module, body, mode, samples, classes: quantise_onnx(body, mode, samples, classes),
        "executorch": lambda module, _body, mode, samples, classes: quantise_executorch(module, mode, samples, classes),
    }
)
