"""Sums of whole updates by one compiled loop, straight from the memory of their tensors."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subfleet.elastic.compiled_loops import ADDED_TOGETHER, GROUP, Loops, Updates
from subfleet.elastic.contributions import Reading
from subfleet.elastic.exact_sums import run_until_one_fails
from subfleet.elastic.submodel_rows import join_rows
from subfleet.elastic.sum_layout import Numbers, SumLayout

_SPANS = 8
"""Parts of a batch's work for each thread, so that all threads end at about the same time."""


class CompiledBatch:
    """Updates that pass over each chunk of the sums together, while it is in a core's cache.

    It adds the contiguous float32 tensors on the CPU that have rows and that clients weigh as a whole.

    Args:
        sums: the block of sums.
        layout: of the sums.
        readings: what is added; it must outlive the batch.
        exponents: (tensors,): round(value * units * 2^-exponent) is added, and values are at most 2^exponent.
        loops: the compiled loops.
    """

    def __init__(
        self,
        sums: Numbers,
        layout: SumLayout,
        readings: Sequence[Reading],
        exponents: npt.NDArray[np.int64],
        loops: Loops,
    ) -> None:
        self._sums = sums
        self._layout = layout
        self._readings = readings
        self._loops = loops
        self._addresses = np.zeros((len(readings), len(layout.places)), np.int64)
        for reading, addresses in zip(readings, self._addresses, strict=True):
            held = reading.held
            addresses[held.has_rows] = [_find_address(reading.values[name]) for name in held.with_rows]
            addresses[[layout.places[name].position for name in reading.element_units]] = 0
        factors = np.ldexp(np.stack([reading.units for reading in readings]).astype(np.float64), -exponents)
        # float32 like the values, so that the comparison converts nothing; a larger limit is no limit.
        limits = np.minimum(np.ldexp(1.0, exponents), np.finfo(np.float32).max).astype(np.float32)
        of_submodels: dict[int, list[int]] = {}
        for position, reading in enumerate(readings):
            of_submodels.setdefault(id(reading.held), []).append(position)
        self._rows = join_rows([readings[own[0]].held.rows for own in of_submodels.values()])
        groups: list[tuple[int, int, int]] = []
        order: list[int] = []
        for submodel, own in enumerate(of_submodels.values()):
            for together in self._list_groups(own):
                groups.append((submodel, len(order), len(together)))
                order += together
        # Slots that are left add 0 times the last update.
        repeated = np.array([at > 0 and order[at] == order[at - 1] for at in range(len(order))])
        ordered = factors[order]
        ordered[repeated] = 0
        self._updates = Updates(
            groups=np.array(groups, GROUP), addresses=self._addresses[order], factors=ordered, limits=limits
        )
        self._progress = np.zeros(len(layout.chunks), np.int64)

    def list_left(self, position: int) -> list[str]:
        """The names of the tensors of a reading that it does not add."""
        own, places, values = self._addresses[position], self._layout.places, self._readings[position].values
        if np.count_nonzero(own) == len(values):
            return []
        return [name for name in values if not own[places[name].position]]

    def add(self) -> bool:
        """Add all updates to the sums; False, after some were added, if a value is not finite or exceeds its limit."""
        return self._run(1, torch.get_num_threads())

    def undo(self) -> None:
        """Subtract what was added."""
        self._run(-1, 1)

    def _run(self, sign: int, thread_count: int) -> bool:
        finished: list[bool] = []

        def run(start: int, stop: int) -> bool:
            own = self._layout.chunks[start:stop], self._rows, self._updates, sign, self._progress[start:stop]
            finished.append(self._loops.add(self._sums, *own))
            return finished[-1]

        count = len(self._progress)
        step = count if thread_count == 1 else max(1, count // (thread_count * _SPANS))
        run_until_one_fails([partial(run, start, start + step) for start in range(0, count, step)], thread_count)
        return all(finished)

    def _list_groups(self, positions: Sequence[int]) -> Iterator[list[int]]:
        """Readings of the same tensors, one or four together; the last one is repeated in slots that are left."""
        alike: dict[bytes, list[int]] = {}
        for position in positions:
            alike.setdefault((self._addresses[position] != 0).tobytes(), []).append(position)
        for own in alike.values():
            for first in range(0, len(own), ADDED_TOGETHER):
                together = own[first : first + ADDED_TOGETHER]
                yield together if len(together) == 1 else together + together[-1:] * (ADDED_TOGETHER - len(together))


def _find_address(tensor: Tensor) -> int:
    plain = tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()
    return tensor.data_ptr() if plain else 0
