"""Shared bounds of families' settings, and checks that settings are consistent.

A check skips settings that a record does not have.
"""

from collections.abc import Iterator
from typing import Annotated, Protocol

from subfleet.elastic.families.records.blocks import OF_BLOCKS, OF_SECTIONS_OR_BLOCKS
from subfleet.elastic.network import Family
from subfleet.protocol.bounds import Each, Length
from subfleet.protocol.limits import Count, Positive

Counts = Annotated[tuple[Positive, ...], Length(least=1)]
MaybeCounts = tuple[Positive, ...]
BlockNumbers = tuple[Annotated[tuple[Count, ...], Each()], ...]


class _Sectioned(Family, Protocol):
    """A family of sections with a width each."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each section."""


def check_settings(record: _Sectioned) -> Iterator[str]:
    """Yield the inconsistencies between the settings of a record with section widths."""
    widths = record.widths
    if len(widths) != len(record.depths):
        yield f"widths {widths} and depths {record.depths} must have one entry for each section"
        return
    if record.scaler and record.norm == "none":
        yield "scaler is set and norm is 'none', but a scaler needs a norm after it; choose a norm"
    group_size: int = getattr(record, "group_size", 1)
    widths = (*widths, *getattr(record, "hidden_widths", ()), *getattr(record, "layer_widths", ()))
    if record.norm == "group" and any(width % group_size for width in widths):
        yield f"widths are {widths}, but must be multiples of group_size {group_size}"
    yield from _check_counts(record)
    yield from _check_last_layers(record)
    yield from _check_numbers(record)


def check_image(input_shape: tuple[int, ...]) -> Iterator[str]:
    """Check that inputs are images."""
    if len(input_shape) != 3:
        yield f"input_shape is {input_shape}, but must be (channels, height, width)"


def check_symbols(input_shape: tuple[int, ...]) -> Iterator[str]:
    """Check that inputs are sequences of symbols."""
    if len(input_shape) != 1:
        yield f"input_shape is {input_shape}, but must be (tokens,)"


def _check_counts(record: Family) -> Iterator[str]:
    """Check the lengths of settings for sections or blocks."""
    sections, blocks = len(record.depths), sum(record.depths)
    for names, counts in ((("kernels", "strides"), {sections}), (OF_SECTIONS_OR_BLOCKS, {sections, blocks})):
        for name in names:
            values: tuple[int, ...] = getattr(record, name, ())
            if values and len(values) not in counts:
                others = f" or each of the {blocks} blocks" if len(counts) > 1 else ""
                yield (
                    f"{name} is {values}, but must be empty or have one number for each of the {sections} sections"
                    f"{others}"
                )
    for name in OF_BLOCKS:
        values = getattr(record, name, ())
        if values and len(values) != blocks:
            yield f"{name} is {values}, but must be empty or have one number for each of the {blocks} blocks"


def _check_last_layers(record: _Sectioned) -> Iterator[str]:
    layers: tuple[int, ...] = getattr(record, "layer_widths", ())
    if len(layers) != sum(record.depths):
        return
    widths = tuple(layers[sum(record.depths[: section + 1]) - 1] for section in range(len(record.depths)))
    if widths != record.widths:
        yield (
            f"widths are {record.widths}, but must be {widths}, the widths of the sections' last layers in "
            "layer_widths; change one of the two"
        )


def _check_numbers(record: Family) -> Iterator[str]:
    numbers: tuple[tuple[int, ...], ...] = getattr(record, "block_numbers", ())
    if not numbers:
        return
    if tuple(map(len, numbers)) != record.depths:
        yield (
            f"block_numbers are {numbers}, but must be empty or have one number for each block of sections with depths "
            f"{record.depths}"
        )
        return
    for section, own in enumerate(numbers):
        if own[0]:
            yield (
                f"block_numbers of section {section} are {own}, but must begin with 0, because the first block of a "
                "section is always kept"
            )
