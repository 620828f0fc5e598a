"""What inputs are like in a few numbers, summed up piece by piece: no copy of a data set is made."""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.input_statistics import InputStatistics
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.transforms.data_transform import undo_normalisation

VALUES_AT_ONCE = 2**18


def measure_inputs(dataset: Dataset) -> InputStatistics:
    """What the inputs of a data set are like; of those that were normalised, as they were before."""
    meter = InputMeter()
    rows = max(1, VALUES_AT_ONCE * len(dataset) // dataset.inputs.size)
    for start in range(0, len(dataset), rows):
        meter.add(undo_normalisation(dataset.inputs[start : start + rows], dataset.transform))
    return meter.result()


class InputMeter:
    """Adds up statistics of inputs; the same pieces in the same order always give the same."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        self._least = np.inf
        self._most = -np.inf
        self._indices = False

    def add(self, inputs: npt.NDArray[np.generic]) -> None:
        """Add one value or more, all finite; a copy in double precision is made of them."""
        self._indices |= bool(np.issubdtype(inputs.dtype, np.integer))
        values = inputs.astype(np.float64)
        self._least = min(self._least, float(values.min()))
        self._most = max(self._most, float(values.max()))
        mean = float(values.mean())
        count, away = self._count + values.size, mean - self._mean
        values -= mean
        # Squares about the mean of all, out of those about the mean of each (Chan, Golub and LeVeque 1979).
        self._squares += float(np.vdot(values, values)) + away * away * self._count * values.size / count
        self._mean += away * values.size / count
        self._count = count

    def result(self) -> InputStatistics:
        """Of all that was added, which is one value or more."""
        return InputStatistics(
            kind="indices" if self._indices else "numbers",
            minimum=self._least,
            maximum=self._most,
            mean=self._mean,
            deviation=float(np.sqrt(self._squares / self._count)),
        )
