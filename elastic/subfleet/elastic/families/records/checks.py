"""Checks that settings of families are consistent; a check skips settings that a record does not have."""

from collections.abc import Iterator
from typing import Protocol

from subfleet.elastic.network import Family


def expand_to_blocks(values: tuple[int, ...], depths: tuple[int, ...]) -> tuple[int, ...]:
    """Expand numbers that are given for each section or each block to blocks; empty stays empty."""
    if len(values) in {0, sum(depths)}:
        return values
    return tuple(value for value, depth in zip(values, depths, strict=True) for _ in range(depth))


class Sectioned(Family, Protocol):
    """A family of sections with a width each, and perhaps other settings of sections and blocks."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of blocks of each section, at least 1; the first is always kept."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each section."""


def check_settings(record: Sectioned) -> Iterator[str]:
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
    kernels: tuple[int, ...] = getattr(record, "kernels", ())
    for section, side in enumerate(kernels):
        if side % 2 == 0:
            yield f"a kernel of section {section} is {side} wide, but must be odd"
    yield from _check_counts(record)
    yield from _check_last_layers(record)


def check_image(input_shape: tuple[int, ...]) -> Iterator[str]:
    """Check that inputs are images."""
    if len(input_shape) != 3:
        yield f"input_shape is {input_shape}, but must be (channels, height, width)"


def check_symbols(input_shape: tuple[int, ...]) -> Iterator[str]:
    """Check that inputs are sequences of symbols."""
    if len(input_shape) != 1:
        yield f"input_shape is {input_shape}, but must be (tokens,)"


_OF_SECTIONS = ("kernels", "strides")
_OF_SECTIONS_OR_BLOCKS = ("hidden_widths", "squeezed_widths", "heads")
_OF_BLOCKS = ("layer_widths",)


def _check_counts(record: Sectioned) -> Iterator[str]:
    """Check the lengths of settings that have one number for each section, for each block, or for either."""
    sections, blocks = len(record.depths), sum(record.depths)
    of_sections, of_blocks = f"each of the {sections} sections", f"each of the {blocks} blocks"
    for names, counts, words in (
        (_OF_SECTIONS, {sections}, of_sections),
        (_OF_SECTIONS_OR_BLOCKS, {sections, blocks}, f"{of_sections} or {of_blocks}"),
        (_OF_BLOCKS, {blocks}, of_blocks),
    ):
        for name in names:
            values: tuple[int, ...] = getattr(record, name, ())
            if values and len(values) not in counts:
                yield f"{name} is {values}, but must be empty or have one number for {words}"


def _check_last_layers(record: Sectioned) -> Iterator[str]:
    layers: tuple[int, ...] = getattr(record, "layer_widths", ())
    if len(layers) != sum(record.depths):
        return
    widths = tuple(layers[sum(record.depths[: section + 1]) - 1] for section in range(len(record.depths)))
    if widths != record.widths:
        yield (
            f"widths are {record.widths}, but must be {widths}, the widths of the sections' last layers in "
            "layer_widths; change one of the two"
        )
