"""Summary statistics of inputs, accumulated piece by piece without a copy of the data set."""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.input_statistics import InputStatistics
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.transforms.data_transform import undo_normalisation

VALUES_AT_ONCE = 2**18


def measure_inputs(dataset: Dataset) -> InputStatistics:
    """Measure the inputs of a data set, before normalisation."""
    meter = InputMeter()
    rows = max(1, VALUES_AT_ONCE * len(dataset) // dataset.inputs.size)
    for start in range(0, len(dataset), rows):
        meter.add(undo_normalisation(dataset.inputs[start : start + rows], dataset.transform))
    return meter.result()


class InputMeter:
    """Accumulates statistics of inputs; the same pieces in the same order give the same result."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        self._least = np.inf
        self._most = -np.inf
        self._indices = False

    def add(self, inputs: npt.NDArray[np.generic]) -> None:
        """Add at least one value, all finite. They are copied in double precision."""
        self._indices |= bool(np.issubdtype(inputs.dtype, np.integer))
        values = inputs.astype(np.float64)
        self._least = min(self._least, float(values.min()))
        self._most = max(self._most, float(values.max()))
        mean = float(values.mean())
        count, away = self._count + values.size, mean - self._mean
        values -= mean
        # Combines sums of squares about two means (Chan, Golub and LeVeque 1979).
        self._squares += float(np.vdot(values, values)) + away * away * self._count * values.size / count
        self._mean += away * values.size / count
        self._count = count

    def result(self) -> InputStatistics:
        """The statistics of all values; at least one must have been added."""
        return InputStatistics(
            kind="indices" if self._indices else "numbers",
            minimum=self._least,
            maximum=self._most,
            mean=self._mean,
            deviation=float(np.sqrt(self._squares / self._count)),
        )
