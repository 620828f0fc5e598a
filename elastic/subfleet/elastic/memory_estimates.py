"""Estimates of the planned memory of submodels' training programs: plain numbers for thousands of submodels at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.elastic.network import Network
from subfleet.elastic.size_table import Floats, SizeColumns
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.submodel import Architecture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryEstimates:
    """Memory of a network's submodels under fixed settings, for one target, as a sum of products of axes.

    `subfleet.export.estimation` creates it in seconds; an estimate takes microseconds. It takes kilobytes.

    Attributes:
        columns: columns of the sizes that memory depends on.
        held: how often each size is held throughout, (columns,).
        peaks: how often each size is in use at moments that may be the peak of a memory, (moments, columns).
        parts: number of moments of each memory, in order; the memories add up, (memories,).
        lines: factors and constants, (lines, 2). The runtime takes the smallest of their results for the peak of the
            first memory; the others are as large as their peaks.
    """

    columns: SizeColumns
    held: Floats
    peaks: Floats
    parts: tuple[int, ...]
    lines: Floats

    def memory_bytes(self, network: Network, architectures: Sequence[Architecture]) -> list[int]:
        """Estimate the planned memory of the programs of submodels; an estimate is not a bound.

        Args:
            network: the network of these estimates.
            architectures: its submodels; they are not checked.
        """
        sizes = self.columns.of(network, architectures)
        peaks = self.measure_peaks(sizes)
        taken = np.outer(peaks[:, 0], self.lines[:, 0]) + self.lines[:, 1]
        estimates = sizes @ self.held + taken.min(axis=1) + peaks[:, 1:].sum(axis=1)
        return [int(estimate) for estimate in np.ceil(estimates)]

    def measure_peaks(self, sizes: Floats) -> Floats:
        """The largest sums of each memory's moments, for rows of sizes: (submodels, memories)."""
        memories = np.split(self.peaks, np.cumsum(self.parts)[:-1])
        return np.column_stack([(sizes @ moments.T).max(axis=1, initial=0) for moments in memories])

    def pack(self) -> bytes:
        """Encode as a tensor container."""
        columns = self.columns
        return encode_arrays(
            {
                "numbers": columns.numbers,
                "powers": columns.powers,
                "blocks": columns.blocks,
                "least": columns.least,
                "held": self.held,
                "peaks": self.peaks,
                "parts": np.array(self.parts, dtype=np.int64),
                "lines": self.lines,
            }
        )

    @classmethod
    def unpack(cls, content: bytes) -> "MemoryEstimates":
        """Decode the content that `pack` encoded.

        Raises:
            ProtocolError: the content holds no cost estimates.
        """
        arrays = decode_arrays(content)
        try:
            floats = {
                name: np.array(arrays[name], np.float64) for name in ("numbers", "powers", "held", "peaks", "lines")
            }
            parts = np.array(arrays["parts"], np.int64)
            columns = SizeColumns(
                numbers=floats["numbers"],
                powers=floats["powers"],
                blocks=np.array(arrays["blocks"], np.int64),
                least=np.array(arrays["least"], np.int64),
            )
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"a tensor container holds no cost estimates: {error}") from error
        length = len(columns.numbers)
        shapes = (columns.powers.shape[1:], columns.blocks.shape, floats["held"].shape, floats["peaks"].shape[1:])
        if any(shape != (length,) for shape in shapes) or columns.least.shape[1:] != (3,):
            raise ProtocolError(f"cost estimates have columns of shapes {shapes}, but must have {length} each")
        if parts.sum() != len(floats["peaks"]) or (parts < 1).any():
            raise ProtocolError(f"cost estimates have {len(floats['peaks'])} moments in parts {parts.tolist()}")
        if floats["lines"].shape[1:] != (2,) or not len(floats["lines"]):
            raise ProtocolError(f"cost estimates have lines of shape {floats['lines'].shape}, but must have (lines, 2)")
        return cls(
            columns=columns,
            held=floats["held"],
            peaks=floats["peaks"],
            parts=tuple(int(part) for part in parts),
            lines=floats["lines"],
        )
