"""Settings of NAS-Bench-201 networks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.elastic.families.records.checks import Counts, MaybeCounts, check_image, check_settings
from subfleet.elastic.families.records.genotypes import STAND_IN, edges_of
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive

if TYPE_CHECKING:
    from torch import nn


def _check_cell(cell: str) -> Iterator[str]:
    edges_of(cell)  # raises for an invalid cell
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image, _check_cell)
class NasBench201:
    """Sections of one cell, separated by residual blocks that halve the image (Dong and Yang 2020, section 2.1).

    Attributes:
        input_shape: (channels, height, width).
        class_count: as in `Family`.
        widths: channels of each section.
        depths: as in `Family`; from the second section on, the first block halves the image.
        cell: genotype in the benchmark's notation; see `subfleet.elastic.families.records.genotypes`.
        hidden_widths: for each section or each block, the channels of the inner nodes with only convolutions before and
            after them; empty means the section's width.
        group_size: channels of one normalisation group; widths must be multiples of it if norm is "group". Groups are
            never split between submodels, so a submodel normalises its channels exactly like the full network.
        norm: "group"; "batch" with running statistics that are sent with the weights; or "none".
        scaler: as in `Family`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "nas_bench_201"
    PREDICTS: ClassVar[Places] = "sample"
    learnable_steps: ClassVar[bool] = False
    input_shape: Counts
    class_count: Positive
    widths: Counts
    depths: Counts
    cell: str = STAND_IN
    hidden_widths: MaybeCounts = ()
    group_size: Positive = 4
    norm: Literal["group", "batch", "none"] = "group"
    scaler: bool = False

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.families.nas_bench import nas_bench_201

        return nas_bench_201(self)
