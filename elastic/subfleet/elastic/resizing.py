"""Settings of a network with other axis sizes."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from subfleet.elastic.building import network_of
from subfleet.elastic.explicit import ExplicitFamily
from subfleet.elastic.families import AnyFamily
from subfleet.elastic.families.records.blocks import OF_BLOCKS, block_numbers, expand_to_blocks
from subfleet.elastic.families.sections import block_name, layer_axis
from subfleet.elastic.network import Family, Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

AXES_OF_BLOCKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden_widths": ("inner", "filtered", "hidden"),
        "squeezed_widths": ("squeezed",),
        "heads": ("heads",),
        "layer_widths": ("width",),
    }
)
"""The last part of the names of the axes inside a block that a setting sizes."""
_FIRST_AXES: Mapping[str, str] = MappingProxyType({"stem_width": "stem", "embedding_width": "embedding"})
"""The axis of the first block's input, if no section has it."""


def has_setting(config: Family, name: str) -> bool:
    """Whether a family has a setting."""
    return name in {field.name for field in fields(config)}


def has_section_widths(config: Family) -> bool:
    """Whether all blocks have the width of their section."""
    layered = getattr(config, "layer_widths", ())
    return not any(has_setting(config, name) for name in AXES_OF_BLOCKS if layered or name not in OF_BLOCKS)


def head_widths(network: Network) -> set[int]:
    """The widths of its attention heads."""
    return {axis.size for axis in network.axes.values() if axis.kind == "head_dim"}


def derive_settings(network: Network, size: Architecture) -> AnyFamily:
    """Derive the settings of the network that equals a submodel with all blocks.

    Raises:
        ConfigError: the submodel lacks a block, or the family's settings cannot express it.
    """
    config: AnyFamily = resize(network, network.sizes(size))
    derived, own = network_of(config), {name: decl.shape for name, decl in network_of(config).tensors.items()}
    if own != network.shapes(size) or derived.config.depths != network.config.depths:
        raise ConfigError(
            f"submodel {size.name!r} of family {network.config.TYPE!r} is not a network of that family by itself; "
            "choose another one"
        )
    return config


def resize(network: Network, sizes: Mapping[str, int]) -> Any:
    """The settings with other axis sizes; settings that do not change keep their form.

    Args:
        network: the network.
        sizes: sizes of all its axes by name.
    """
    config: Any = network.config
    if all(sizes[name] == axis.size for name, axis in network.axes.items()):
        return config
    if isinstance(config, ExplicitFamily):
        return config.with_sizes(sizes)
    settings: dict[str, Any] = {}
    if has_setting(config, "widths"):
        settings["widths"] = tuple(
            sizes.get(_stream(network, section), width) for section, width in enumerate(config.widths)
        )
    streams = settings.get("widths") != getattr(config, "widths", None)
    for name, axis in _FIRST_AXES.items():
        if has_setting(config, name) and axis in network.axes and (streams or sizes[axis] != network.axes[axis].size):
            settings[name] = sizes[axis]
    for name in AXES_OF_BLOCKS:
        if has_setting(config, name):
            settings[name] = _resize_blocks(network, name, sizes, explicitly=streams)
    if has_setting(config, "last_widths") and (streams or config.last_widths):
        last = [f"last{index}" for index in range(len(network.axes)) if f"last{index}" in network.axes]
        settings["last_widths"] = tuple(sizes[name] for name in last)
    if has_setting(config, "head_width") and (streams or settings["heads"] != config.heads):
        widths = {sizes[name] for name, axis in network.axes.items() if axis.kind == "head_dim"}
        settings["head_width"] = min(widths)  # by default it would follow from the number of heads
    return replace(config, **settings)


def list_block_sizes(network: Network, name: str) -> tuple[int, ...]:
    """The value of a setting such as `hidden_widths` for each block, including defaults."""
    return _resize_blocks(network, name, {name: axis.size for name, axis in network.axes.items()}, explicitly=True)


def _stream(network: Network, section: int) -> str:
    """The axis of a section's width: its own, that of an earlier section that it continues, or one for all sections."""
    last = layer_axis(section, block_numbers(network.config)[section][-1])
    if last in network.axes:
        return last
    own = (f"section{index}.{end}" for index in range(section, -1, -1) for end in ("stream", "state"))
    return next((name for name in own if name in network.axes), "stream")


def _resize_blocks(network: Network, name: str, sizes: Mapping[str, int], *, explicitly: bool) -> tuple[int, ...]:
    """The new value of a setting of blocks."""
    config = network.config
    values: tuple[int, ...] = getattr(config, name)
    each = expand_to_blocks(values, config.depths)
    resized, changed = list[int](), explicitly
    for index, (block, read) in enumerate(_iterate_blocks(network)):
        ends = (f"{block}.{end}" for end in AXES_OF_BLOCKS[name])
        axis = next((end for end in ends if end in network.axes), None)
        before = network.axes[axis].size if axis else each[index] if each else 0
        if axis is None and before and name == "hidden_widths":  # without widening: as wide as the input
            axis = read
        resized.append(sizes[axis] if axis else before)
        changed = changed or resized[-1] != before
    return tuple(resized) if changed and any(resized) else values


def _iterate_blocks(network: Network) -> Iterator[tuple[str, str]]:
    """Yield each block's name and the axis of its input."""
    read = next((axis for axis in _FIRST_AXES.values() if axis in network.axes), _stream(network, 0))
    for section, numbers in enumerate(block_numbers(network.config)):
        for number in numbers:
            yield block_name(section, number), read
            read = _stream(network, section)
