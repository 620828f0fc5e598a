"""What a runtime holds besides tensors, told from the recordings of other subnets.

The program itself follows from its nodes and tensors. The runtime's objects were counted in the C library's heap, and
plans round the count up. They grow with the nodes, too, but not evenly: nodes of some kinds are larger, and constants
of one shape are held once. So they are told as the least and the most that a plan may come to count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subfleet.export.pricing.layers import Layer
from subfleet.export.pricing.recording import Recording

__all__ = ["Between", "RuntimeSizes", "again_bytes"]

_AGAIN_BYTES = 3 * 2**13
"""By so much two counts of one program differ at most. Measured: 10 kB, once 20."""
_LESS, _MORE = 0.012, 0.02
"""By such parts counts differ for programs with layers of the same kinds. Measured: 1.1 % less to 1.5 % more."""
_SPREAD = 0.03
"""By such a part the counts of recordings differ that are alike at most."""
_NEAR = 0.01
"""And by such a part the weights of their nodes."""

Features = tuple[float, float, float]
_Kinds = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """The least and the most."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    recording: Recording
    features: Features
    kinds: _Kinds


class RuntimeSizes:
    """What is known of them.

    Args:
        counts_nodes: whether a node's weight is 1. Weights in bytes hold constants, which layers may share, so they
            tell no line.
    """

    def __init__(self, *, counts_nodes: bool) -> None:
        self._counts_nodes = counts_nodes
        self._known: list[_Known] = []

    def add(self, recording: Recording) -> None:
        """Learn from one more recording."""
        weight = sum(segment.weight for segment in recording.segments)
        features = (1.0, weight, recording.tensor_count)
        self._known.append(_Known(recording=recording, features=features, kinds=_kinds(recording.layers)))

    def written_bytes(self, layers: tuple[Layer, ...], weight: int, tensor_count: int) -> int | None:
        """The program and what follows from its size; None where the recordings do not tell it.

        Args:
            layers: of the subnet.
            weight: of all nodes.
            tensor_count: of the subnet.
        """
        wanted: Features = (1.0, weight, tensor_count)
        own = [known.recording.runtime_bytes for known in self._known if known.recording.layers == layers]
        same = own or [known.recording.runtime_bytes for known in self._known if known.features == wanted]
        if same:
            return int(np.median(same))
        if not self._counts_nodes:
            return max((known.recording.runtime_bytes for known in self._alike(layers, weight)), default=None)
        line = self._on_a_line([known.recording.runtime_bytes for known in self._known], wanted)
        return math.ceil(sum(line)) if line else None

    def objects_bytes(self, layers: tuple[Layer, ...], weight: int, tensor_count: int) -> Between | None:
        """What may be counted for the runtime's objects; 0 where it does not count them, None where it is not told."""
        if not any(known.recording.objects_bytes for known in self._known):
            return Between(least=0, most=0)
        own = [known.recording.objects_bytes for known in self._known if known.recording.layers == layers]
        if own:
            return Between(least=again_bytes(own[0]), most=again_bytes(own[0]))
        alike = [known.recording.objects_bytes for known in self._alike(layers, weight)]
        if len(alike) > 1 and max(alike) - min(alike) <= _SPREAD * min(alike):
            told, off = float(np.median(alike)), 0.0
        else:
            wanted: Features = (1.0, weight, tensor_count)
            counted = [known.recording.objects_bytes for known in self._known]
            line = self._on_a_line(counted, wanted) if self._counts_nodes else None
            if line is None:
                return None
            told, off = line
        return Between(least=int((1 - _LESS) * told - off), most=math.ceil((1 + _MORE) * told + off))

    def _alike(self, layers: Sequence[Layer], weight: int) -> list[_Known]:
        """Recordings with layers of the same kinds, and nodes of about that weight."""
        kinds = _kinds(layers)
        return [
            known
            for known in self._known
            if known.kinds == kinds and abs(known.features[1] - weight) <= _NEAR * known.features[1]
        ]

    def _on_a_line(self, found: Sequence[int], wanted: Features) -> tuple[float, float] | None:
        """What a line through all that was found tells, and how far it lies from what was found at most.

        None where the recordings do not tell a line there, or no more than one: it would fit whatever was found.
        """
        features = [known.features for known in self._known]
        rows, values = np.array(features, dtype=np.float64), np.array(found, dtype=np.float64)
        slopes, _, rank, _ = np.linalg.lstsq(rows, values, rcond=None)
        mixed = np.linalg.lstsq(rows.T, np.array(wanted), rcond=None)[0]
        if len({*features}) <= rank or not np.allclose(rows.T @ mixed, wanted):
            return None
        return float(np.array(wanted) @ slopes), float(np.abs(values - rows @ slopes).max())


def again_bytes(objects_bytes: int) -> int:
    """The most that another count of a recorded program's objects may come to; 0 where they are not counted."""
    return objects_bytes + _AGAIN_BYTES if objects_bytes else 0


def _kinds(layers: Sequence[Layer]) -> _Kinds:
    return tuple((layer.name, layer.kind) for layer in layers)
