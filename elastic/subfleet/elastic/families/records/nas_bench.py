"""Settings of NAS-Bench-201 networks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from subfleet.elastic.families.records import fields
from subfleet.elastic.families.records.checks import check_image, check_settings
from subfleet.elastic.families.records.genotypes import STAND_IN, edges_of
from subfleet.elastic.network import Places
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive


def _check_cell(cell: str) -> Iterator[str]:
    edges_of(cell)  # raises for an invalid cell
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_settings, check_image, _check_cell)
class NasBench201:
    """Sections of one cell, separated by residual blocks that halve the image (Dong and Yang 2020, section 2.1).

    The cell is a genotype in the benchmark's notation, see `subfleet.elastic.families.records.genotypes`. From the
    second section on, the first block halves the image. Hidden widths are those of the inner nodes with only
    convolutions before and after them, usually the section's.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "nas_bench_201"
    PREDICTS: ClassVar[Places] = "sample"
    learnable_steps: ClassVar[bool] = False
    input_shape: fields.Counts
    class_count: Positive
    widths: fields.Widths
    depths: fields.Depths
    cell: str = STAND_IN
    hidden_widths: fields.HiddenWidths = ()
    group_size: fields.GroupSize = 4
    norm: fields.ReplaceableNorm = "group"
    scaler: bool = False
    module = fields.built_by("subfleet.elastic.families.nas_bench:nas_bench_201")
