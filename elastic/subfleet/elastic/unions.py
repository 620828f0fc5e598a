"""The union of networks of one family: the smallest network that has all of them as submodels.

This is FedADP's global model (section III: "the union of all clients' architectures"): the largest width of each
section, and all blocks. Blocks are matched by number, so a block that was inserted into one network is an additional
one; counted blocks give the largest depth. If layers of any network have widths of their own, so do those of the union:
the largest width that a network has there or, without the layer, passes on.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from subfleet.elastic.building import network_of
from subfleet.elastic.explicit import ExplicitFamily
from subfleet.elastic.families.records.blocks import (
    OF_BLOCKS,
    OF_SECTIONS_OR_BLOCKS,
    block_numbers,
    encode_block_numbers,
    expand_to_blocks,
)
from subfleet.elastic.network import Family
from subfleet.elastic.replication import size_in
from subfleet.elastic.resizing import list_block_sizes
from subfleet.protocol.errors import ConfigError

_FIRST = frozenset({"stem_width", "embedding_width"})
_GROWING = frozenset({"widths", "last_widths", *_FIRST})
"""Settings of the size of a network; all others, except those of blocks, must be equal in a union."""
_OF_BLOCKS = frozenset({"depths", "block_numbers", *OF_SECTIONS_OR_BLOCKS, *OF_BLOCKS})
_Numbers = tuple[tuple[int, ...], ...]


def unite_families(families: Sequence[Family]) -> Family:
    """The settings of the smallest network that has all of these as submodels.

    Args:
        families: settings of at least one network, all of one family.

    Raises:
        ConfigError: there are several families; settings differ in more than sizes or in numbers of parts; the orders
            of blocks contradict each other; or a network is not a submodel of the union, for example because strides
            differ.
    """
    if not families:
        raise ConfigError("a union needs at least one network")
    first = families[0]
    kinds = sorted({family.TYPE for family in families})
    if len(kinds) > 1:
        raise ConfigError(f"networks of the families {', '.join(kinds)} have no union; use networks of one family")
    if isinstance(first, ExplicitFamily):
        return _check_parts_of(first.united_with(families[1:]), families)
    differing = [field.name for field in fields(first) if len({getattr(own, field.name) for own in families}) > 1]
    settings = {
        name: _largest(name, [_resolve_setting(family, name) for family in families])
        for name in differing
        if name not in _OF_BLOCKS
    }
    if _OF_BLOCKS.intersection(differing):
        settings |= _unite_blocks(families)
    return _check_parts_of(replace(first, **settings), families)


def _check_parts_of(union: Family, families: Sequence[Family]) -> Family:
    """The union if every network is a submodel of it."""
    network = network_of(union)
    for family in families:
        size_in(network, network_of(family))
    return union


def _resolve_setting(family: Any, name: str) -> Any:
    """The value of a setting; 0 for the width of the first block's input means the width of the first section."""
    return getattr(family, name) or (family.widths[0] if name in _FIRST else getattr(family, name))


def _largest(name: str, values: Sequence[Any]) -> Any:
    if name not in _GROWING:
        raise ConfigError(f"the networks differ in {name} ({values[0]!r} and others), but it must be equal in all")
    if isinstance(values[0], int):
        return max(values)
    _check_parts(name, values)
    return tuple(max(parts) for parts in zip(*values, strict=True))


def _check_parts(name: str, values: Sequence[Sequence[object]]) -> None:
    if len({len(value) for value in values}) > 1:
        raise ConfigError(f"the networks' {name} have different lengths, but must have the same")


def _unite_blocks(families: Sequence[Family]) -> dict[str, Any]:
    """The settings of blocks: every block of any network with its largest sizes."""
    _check_parts("depths", [family.depths for family in families])
    every = [block_numbers(family) for family in families]
    numbers = tuple(_join_orders(section, orders) for section, orders in enumerate(zip(*every, strict=True)))
    own = {field.name for field in fields(families[0])}
    settings: dict[str, Any] = {"depths": tuple(map(len, numbers)), "block_numbers": encode_block_numbers(numbers)}
    settings |= {name: _sizes(name, families, every, numbers) for name in OF_SECTIONS_OR_BLOCKS if name in own}
    settings["layer_widths"] = _layer_widths(families, every, numbers)
    return {name: value for name, value in settings.items() if name in own}


def _join_orders(section: int, orders: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """All block numbers of a section in an order that agrees with every network; ties in ascending order."""
    left = {number for order in orders for number in order}
    before = {
        number: {other for order in orders if number in order for other in order[: order.index(number)]}
        for number in left
    }
    joined: list[int] = []
    while left:
        ready = [number for number in left if not before[number] & left]
        if not ready:
            raise ConfigError(
                f"the networks have the blocks {sorted(left)} of section {section} in contradictory orders; give them "
                "the same order"
            )
        joined.append(min(ready))
        left.remove(joined[-1])
    return tuple(joined)


def _sizes(name: str, families: Sequence[Family], every: Sequence[_Numbers], numbers: _Numbers) -> tuple[int, ...]:
    """The largest value of a setting for each section or block over all networks."""
    values: list[tuple[int, ...]] = [getattr(family, name) for family in families]
    depths = [family.depths for family in families]
    if {len(value) for value in values} <= {len(numbers)} or not any(values):
        return tuple(max(parts) for parts in zip(*values, strict=True))
    if not all(values):  # empty in some networks
        pairs = zip(families, values, strict=True)
        values = [value or list_block_sizes(network_of(family), name) for family, value in pairs]
    largest: dict[tuple[int, int], int] = {}
    for value, depth, own in zip(values, depths, every, strict=True):
        keys = [(section, number) for section, inside in enumerate(own) for number in inside]
        for key, size in zip(keys, expand_to_blocks(value, depth), strict=True):
            largest[key] = max(size, largest.get(key, 0))
    return tuple(largest[section, number] for section, inside in enumerate(numbers) for number in inside)


def _layer_widths(families: Sequence[Any], every: Sequence[_Numbers], numbers: _Numbers) -> tuple[int, ...]:
    """The largest output of each layer, or of its input without the layer; empty without widths of layers."""
    if not any(getattr(family, "layer_widths", ()) for family in families):
        return ()
    largest: dict[tuple[int, int], int] = {}
    for family, own in zip(families, every, strict=True):
        layers = iter(family.layer_widths or expand_to_blocks(family.widths, family.depths))
        widths = {(section, number): next(layers) for section, inside in enumerate(own) for number in inside}
        for section, inside in enumerate(numbers):
            width = 0
            for number in inside:
                width = widths.get((section, number), width)
                largest[section, number] = max(width, largest.get((section, number), 0))
    return tuple(largest.values())
