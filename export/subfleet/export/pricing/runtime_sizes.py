"""What a runtime holds besides tensors, told from the recordings of other subnets.

The program itself follows from its nodes and tensors. The runtime's objects were counted in the C library's heap, and
plans round the count up. They grow with the nodes, too, but not evenly: nodes of some kinds are larger, and constants
of one shape are held once. So they are told as the least and the most that a plan may come to count.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subfleet.export.pricing.layers import Layer
from subfleet.export.pricing.recording import Recording

__all__ = ["Between", "RuntimeSizes"]

_AGAIN_BYTES = 3 * 2**13
"""By so much two counts of one program differ at most. Measured: 10 kB, once 20."""
_LESS, _MORE = 0.012, 0.02
"""By such parts counts differ for programs with layers of the same kinds. Measured: 0.9 % less to 1.9 % more."""

Features = tuple[float, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """The least and the most."""

    least: int
    most: int


class RuntimeSizes:
    """What is known of them."""

    def __init__(self) -> None:
        self._features: list[Features] = []
        self._written: list[int] = []
        self._objects: list[int] = []
        self._of_layers: dict[tuple[Layer, ...], int] = {}
        self._of_kinds: defaultdict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = defaultdict(list)

    def add(self, recording: Recording) -> None:
        """Learn from one more recording."""
        weight = sum(segment.weight for segment in recording.segments)
        self._features.append((1.0, weight, recording.tensor_count))
        self._written.append(recording.runtime_bytes)
        self._objects.append(recording.objects_bytes)
        self._of_layers[recording.layers] = recording.objects_bytes
        self._of_kinds[_kinds(recording.layers)].append(recording.objects_bytes)

    def written_bytes(self, weight: int, tensor_count: int) -> int | None:
        """The program and what follows from its size; None where the recordings do not tell it.

        Args:
            weight: of all nodes.
            tensor_count: of the subnet.
        """
        wanted = (1.0, weight, tensor_count)
        same = [found for features, found in zip(self._features, self._written, strict=True) if features == wanted]
        if same:
            return int(np.median(same))
        if len({known for _, known, _ in self._features}) < 2:
            return None
        told, off = self._on_a_line(self._written, wanted)
        return math.ceil(told + off)

    def objects_bytes(self, layers: tuple[Layer, ...], weight: int, tensor_count: int) -> Between:
        """What may be counted for the runtime's objects; 0 where it does not count them."""
        if not any(self._objects):
            return Between(least=0, most=0)
        if layers in self._of_layers:
            most = self._of_layers[layers] + _AGAIN_BYTES
            return Between(least=most, most=most)
        alike = self._of_kinds.get(_kinds(layers))
        told, off = (np.median(alike), 0.0) if alike else self._on_a_line(self._objects, (1.0, weight, tensor_count))
        return Between(least=int((1 - _LESS) * told - off), most=math.ceil((1 + _MORE) * told + off))

    def _on_a_line(self, found: Sequence[int], wanted: Features) -> tuple[float, float]:
        """What a line through all that was found tells, and how far it lies from what was found."""
        known, values = np.array(self._features), np.array(found, dtype=np.float64)
        slopes = np.linalg.lstsq(known, values, rcond=None)[0]
        return float(np.array(wanted) @ slopes), float(np.abs(values - known @ slopes).max())


def _kinds(layers: Sequence[Layer]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((layer.name, layer.kind) for layer in layers)
