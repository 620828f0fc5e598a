"""What is asked of a device that measures the running statistics of norms on its own data, as plain data."""

from dataclasses import dataclass

__all__ = ["Calibration", "NormLayer", "sum_names"]

_MOST_POSITIONS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayer:
    """A norm with running statistics.

    Attributes:
        name: of the layer in the subnet.
        positions: values that it is given of each channel of one sample: 1, or height times width.
        momentum: the share that a batch has in its running statistics, above 0 and at most 1.
        scale: what it is given in training is this much smaller than in use, above 0: the rate of HeteroFL's scaler.
    """

    name: str
    positions: int
    momentum: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.positions <= _MOST_POSITIONS:
            raise ValueError(f"positions is {self.positions}, but must be 1 to {_MOST_POSITIONS}")
        if not 0 < self.momentum <= 1 or not self.scale > 0:
            raise ValueError(
                f"momentum is {self.momentum} and scale {self.scale}, but they must be above 0, and momentum at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The norms whose inputs are to be summed up, one or more."""

    norms: tuple[NormLayer, ...]

    def __post_init__(self) -> None:
        names = [norm.name for norm in self.norms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"norms are {names!r:.200}, but must be one or more, each once")


def sum_names(norm: str) -> tuple[str, str, str]:
    """Names of a norm's tensors in the answer: count, int64 (), sum and sum of squares, float64 (channels,)."""
    return f"{norm}.count", f"{norm}.sum", f"{norm}.square_sum"
