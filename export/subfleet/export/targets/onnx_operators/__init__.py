"""PyTorch's basic operators in ONNX: one small function each, in tables.

They only cover what our lowerings leave over. Shapes are fixed at export, except that leading sizes are written so that
an inference model takes batches of any size.
"""

from collections.abc import Mapping
from types import MappingProxyType

from subfleet.export.targets.onnx_operators.elementwise import ELEMENTWISE
from subfleet.export.targets.onnx_operators.emitting import Emitter, Translation
from subfleet.export.targets.onnx_operators.layers import LAYERS
from subfleet.export.targets.onnx_operators.movement import SHAPING
from subfleet.export.targets.onnx_operators.pooling import POOLS

__all__ = ["OPERATORS", "Emitter", "Translation"]

OPERATORS: Mapping[object, Translation] = MappingProxyType({**ELEMENTWISE, **SHAPING, **LAYERS, **POOLS})
