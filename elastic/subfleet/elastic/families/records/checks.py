"""What families' records check of the settings that they share. A check looks at those that a record has."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from subfleet.elastic.families.records.blocks import OF_BLOCKS, OF_SECTIONS_OR_BLOCKS
from subfleet.elastic.network import Family
from subfleet.protocol.errors import ConfigError

__all__ = ["check_image", "check_settings", "check_symbols"]

_OF_SECTIONS: Mapping[str, int] = MappingProxyType({"kernels": 1, "strides": 1})
_SIZES: Mapping[str, int] = MappingProxyType(
    {"stem_stride": 1, "stem_width": 0, "head_width": 0, "vocabulary": 0, "embedding_width": 0, "patch": 0}
)
"""The least that each number may be, by the name of its setting."""


def check_settings(record: Family, norms: Iterable[str]) -> None:
    """Make sure that a record's settings are in their ranges, and fit each other.

    Args:
        record: with `widths` of its sections beside what every family has.
        norms: that its family knows.

    Raises:
        ConfigError: they are not.
    """
    widths: tuple[int, ...] = _of(record, "widths")
    if not record.input_shape or min(record.input_shape) < 1:
        raise ConfigError(f"input_shape is {record.input_shape}, but must hold one or more sizes of 1 or more")
    if record.class_count < 1:
        raise ConfigError(f"class_count is {record.class_count}, but must be 1 or more")
    if not widths or len(widths) != len(record.depths):
        raise ConfigError(
            f"widths {widths} and depths {record.depths} must have one entry for each section, at least one"
        )
    if min(widths) < 1:
        raise ConfigError(f"widths are {widths}, but must be 1 or more")
    if min(record.depths) < 1:
        raise ConfigError(f"depths are {record.depths}, but every section needs 1 block or more")
    _check_norm(record, norms)
    _check_sections(record)
    _check_layers(record)
    _check_numbers(record)


def check_image(record: Family) -> None:
    """Make sure that inputs are images.

    Raises:
        ConfigError: they are not.
    """
    if len(record.input_shape) != 3:
        raise ConfigError(
            f"input_shape is {record.input_shape}, but family {record.TYPE!r} needs (channels, height, width)"
        )


def check_symbols(record: Family) -> None:
    """Make sure that inputs are sequences of symbols.

    Raises:
        ConfigError: they are not.
    """
    vocabulary: int = _of(record, "vocabulary")
    if len(record.input_shape) != 1 or not vocabulary:
        raise ConfigError(
            f"input_shape is {record.input_shape} and vocabulary is {vocabulary}, but family "
            f"{record.TYPE!r} needs (tokens,) and 1 symbol or more"
        )


def _of(record: Family, name: str) -> Any:
    return getattr(record, name)


def _check_norm(record: Family, norms: Iterable[str]) -> None:
    if record.norm not in norms:
        raise ConfigError(f"norm is {record.norm!r}, but family {record.TYPE!r} knows {sorted(norms)}")
    if record.scaler and record.norm == "none":
        raise ConfigError("scaler is set and norm is 'none', but a scaler stands before norms; choose a norm")
    if not hasattr(record, "group_size"):
        return
    group_size: int = _of(record, "group_size")
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size}, but must be 1 or more")
    widths = (*_of(record, "widths"), *getattr(record, "hidden_widths", ()), *getattr(record, "layer_widths", ()))
    if record.norm == "group" and any(width % group_size for width in widths):
        raise ConfigError(f"widths are {widths}, but must be multiples of group_size {group_size}")


def _check_sections(record: Family) -> None:
    sections, blocks = len(record.depths), sum(record.depths)
    for name, least in _OF_SECTIONS.items():
        values = getattr(record, name, ())
        if values and (len(values) != sections or min(values) < least):
            raise ConfigError(
                f"{name} is {values}, but must be empty or one number of {least} or more for each of the "
                f"{sections} sections"
            )
    for name, least in OF_SECTIONS_OR_BLOCKS.items():
        values = getattr(record, name, ())
        if values and (len(values) not in {sections, blocks} or min(values) < least):
            raise ConfigError(
                f"{name} is {values}, but must be empty or one number of {least} or more for each of the "
                f"{sections} sections or each of the {blocks} blocks"
            )
    for name, least in _SIZES.items():
        if getattr(record, name, least) < least:
            raise ConfigError(f"{name} is {_of(record, name)}, but must be {least} or more")
    last_widths = getattr(record, "last_widths", ())
    if min(last_widths, default=1) < 1:
        raise ConfigError(f"last_widths are {last_widths}, but must be 1 or more")


def _check_layers(record: Family) -> None:
    blocks = sum(record.depths)
    for name, least in OF_BLOCKS.items():
        values: tuple[int, ...] = getattr(record, name, ())
        if values and (len(values) != blocks or min(values) < least):
            raise ConfigError(
                f"{name} is {values}, but must be empty or one number of {least} or more for each of the {blocks} "
                "blocks"
            )
    told: tuple[int, ...] = getattr(record, "layer_widths", ())
    if told:
        last = tuple(told[sum(record.depths[: section + 1]) - 1] for section in range(len(record.depths)))
        if last != _of(record, "widths"):
            raise ConfigError(
                f"widths are {_of(record, 'widths')}, but must be {last}, which the last layers of the sections give "
                "by layer_widths; change one of the two"
            )


def _check_numbers(record: Family) -> None:
    numbers: tuple[tuple[int, ...], ...] = getattr(record, "block_numbers", ())
    if not numbers:
        return
    if tuple(map(len, numbers)) != record.depths:
        raise ConfigError(
            f"block_numbers are {numbers}, but must be empty or name one number for each block of sections of depths "
            f"{record.depths}"
        )
    for section, own in enumerate(numbers):
        if min(own) < 0 or len(set(own)) < len(own):
            raise ConfigError(
                f"block_numbers of section {section} are {own}, but must be 0 or more, and each there once"
            )
        if own[0]:
            raise ConfigError(
                f"block_numbers of section {section} are {own}, but must begin with 0: the first block, which reads "
                "what comes before its section and is always kept, stays the first"
            )
