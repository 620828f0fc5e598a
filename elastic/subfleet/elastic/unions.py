"""The smallest network that holds several of one family: section by section the largest width, and all blocks.

FedADP's global model (section III: "the union of all clients' architectures"). Blocks are told by their numbers, so
that one that was inserted into one of the networks is one more; where they are counted, the largest depth is taken.
Where layers of any network have widths of their own, so they have in the union: each the largest that a network gives
or, lacking the layer, passes on there.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from subfleet.elastic.building import network_of
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
"""Fields of families that say how large a network is; in all others but those of blocks a union's must be alike."""
_OF_BLOCKS = frozenset({"depths", "block_numbers", *OF_SECTIONS_OR_BLOCKS, *OF_BLOCKS})
_Numbers = tuple[tuple[int, ...], ...]


def unite_families(families: Sequence[Family]) -> Family:
    """The settings of the smallest network of which all of these are sizes.

    Args:
        families: one or more, of one family.

    Raises:
        ConfigError: they are of several families, differ in more than sizes, list sizes of other numbers of parts, have
            blocks in orders that contradict each other, or are no sizes of what comes of it, as with strides that
            differ.
    """
    if not families:
        raise ConfigError("there are no networks to make a union of; name one or more")
    first = families[0]
    kinds = sorted({one.TYPE for one in families})
    if len(kinds) > 1:
        raise ConfigError(f"networks of the families {', '.join(kinds)} have no union; take those of one family")
    differing = [field.name for field in fields(first) if len({getattr(one, field.name) for one in families}) > 1]
    found = {
        name: _largest(name, [_resolve_setting(one, name) for one in families])
        for name in differing
        if name not in _OF_BLOCKS
    }
    if _OF_BLOCKS.intersection(differing):
        found |= _blocks(families)
    union = replace(first, **found)
    network = network_of(union)
    for one in families:
        size_in(network, network_of(one))
    return union


def _resolve_setting(family: Any, name: str) -> Any:
    """What a setting is: what the first block reads is as wide as the first section where it is told to be 0."""
    return getattr(family, name) or (family.widths[0] if name in _FIRST else getattr(family, name))


def _largest(name: str, values: Sequence[Any]) -> Any:
    if name not in _GROWING:
        raise ConfigError(f"the networks differ in {name}, {values[0]!r} and others, but must be alike in it")
    if isinstance(values[0], int):
        return max(values)
    _check_parts(name, values)
    return tuple(max(parts) for parts in zip(*values, strict=True))


def _check_parts(name: str, values: Sequence[Sequence[object]]) -> None:
    if len({len(value) for value in values}) > 1:
        raise ConfigError(f"the networks' {name} name different numbers of parts, but must name as many")


def _blocks(families: Sequence[Family]) -> dict[str, Any]:
    """The settings that go by blocks: those of each that any of the networks has, at the largest of its sizes."""
    _check_parts("depths", [one.depths for one in families])
    every = [block_numbers(one) for one in families]
    numbers = tuple(_join_orders(section, orders) for section, orders in enumerate(zip(*every, strict=True)))
    own = {field.name for field in fields(families[0])}
    found: dict[str, Any] = {"depths": tuple(map(len, numbers)), "block_numbers": encode_block_numbers(numbers)}
    found |= {name: _sizes(name, families, every, numbers) for name in OF_SECTIONS_OR_BLOCKS if name in own}
    found["layer_widths"] = _layer_widths(families, every, numbers)
    return {name: value for name, value in found.items() if name in own}


def _join_orders(section: int, orders: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """All numbers of a section, each behind those that it is behind in any network, and else the smallest first."""
    left = {number for order in orders for number in order}
    before = {one: {number for order in orders if one in order for number in order[: order.index(one)]} for one in left}
    found: list[int] = []
    while left:
        ready = [number for number in left if not before[number] & left]
        if not ready:
            raise ConfigError(
                f"the networks have the blocks {sorted(left)} of section {section} in orders that contradict each "
                "other, but must agree on which comes first"
            )
        found.append(min(ready))
        left.remove(found[-1])
    return tuple(found)


def _sizes(name: str, families: Sequence[Family], every: Sequence[_Numbers], numbers: _Numbers) -> tuple[int, ...]:
    """Of a setting that is told for each section, or for each block, the largest that any network has of each."""
    values: list[tuple[int, ...]] = [getattr(one, name) for one in families]
    depths = [one.depths for one in families]
    if {len(value) for value in values} <= {len(numbers)} or not any(values):
        return tuple(max(parts) for parts in zip(*values, strict=True))
    if not all(values):  # some leave open what others say
        values = [value or list_block_sizes(network_of(one), name) for one, value in zip(families, values, strict=True)]
    largest: dict[tuple[int, int], int] = {}
    for value, depth, own in zip(values, depths, every, strict=True):
        keys = [(section, number) for section, inside in enumerate(own) for number in inside]
        for key, size in zip(keys, expand_to_blocks(value, depth), strict=True):
            largest[key] = max(size, largest.get(key, 0))
    return tuple(largest[section, number] for section, inside in enumerate(numbers) for number in inside)


def _layer_widths(families: Sequence[Any], every: Sequence[_Numbers], numbers: _Numbers) -> tuple[int, ...]:
    """The most that each layer gives or is passed on in its place; none where all networks have sections' widths."""
    if not any(getattr(one, "layer_widths", ()) for one in families):
        return ()
    largest: dict[tuple[int, int], int] = {}
    for one, own in zip(families, every, strict=True):
        told = iter(one.layer_widths or expand_to_blocks(one.widths, one.depths))
        widths = {(section, number): next(told) for section, inside in enumerate(own) for number in inside}
        for section, inside in enumerate(numbers):
            given = 0
            for number in inside:
                given = widths.get((section, number), given)
                largest[section, number] = max(given, largest.get((section, number), 0))
    return tuple(largest.values())
