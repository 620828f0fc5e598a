"""Networks that grow by a block: it is inserted behind another, and all others keep their names.

A block is told by its section and a number in it, not by its place. A new one gets a number that its section has not
had, so that tensors, axes and submodels' blocks are called in the deeper network as they were before.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from subfleet.elastic.families.records.blocks import (
    OF_BLOCKS,
    OF_SECTIONS_OR_BLOCKS,
    block_numbers,
    encode_block_numbers,
    expand_to_blocks,
)
from subfleet.elastic.network import Family
from subfleet.protocol.errors import ConfigError

__all__ = ["insert_block"]

_FamilyT = TypeVar("_FamilyT", bound=Family)
_NONE: Mapping[str, int] = MappingProxyType({})
_WHERE_EMPTY: Mapping[str, int] = MappingProxyType({"squeezed_widths": 0})
"""What every block has where a setting is empty; of the others, their family knows."""


def insert_block(config: _FamilyT, *, section: int, after: int, sizes: Mapping[str, int] = _NONE) -> _FamilyT:
    """The settings of a network with one more block, whose number is one above the largest of its section.

    It comes behind another, so a section's first block stays the first: it reads what comes before the section, which
    may have another width or be halved, and no submodel leaves it out. The new one keeps its section's width, or, where
    layers have widths of their own, that of the layer before it, and can be left out. At the end of a section whose
    blocks are counted, it is as if the section had been as deep from the start. What a section had and has no more is
    not known here: blocks are left out by submodels, and not taken from settings.

    With first weights of its own the deeper network computes what the other one does where blocks start as the
    identity, as those of `Mlp`, `PreactResNet` and the transformers do. `subfleet.elastic.identities` makes those of
    most other families so.

    Args:
        config: of the network as it is.
        section: index of the section.
        after: number of the block that the new one follows.
        sizes: of the new block, by the setting that has one for each block, such as `hidden_widths`; those that are not
            named are as in the block that it follows.

    Raises:
        ConfigError: there is no such section, block or setting, a size is out of its range, or its setting is empty,
            so that the other blocks' are their family's; or the family does not number its blocks.
    """
    if "block_numbers" not in {field.name for field in fields(config)}:
        raise ConfigError(
            f"family {config.TYPE!r} has no setting block_numbers, so no block can be inserted into its networks"
        )
    numbers, depths = block_numbers(config), config.depths
    if not 0 <= section < len(depths):
        raise ConfigError(
            f"a block is to be inserted into section {section}, but must be in one of 0 to {len(depths) - 1}"
        )
    own = numbers[section]
    if after not in own:
        raise ConfigError(
            f"a block is to be inserted behind number {after} of section {section}, but must be behind one of its "
            f"{list(own)}"
        )
    place = own.index(after) + 1
    grown = (*own[:place], max(own) + 1, *own[place:])
    return replace(
        config,
        depths=(*depths[:section], len(grown), *depths[section + 1 :]),
        block_numbers=encode_block_numbers((*numbers[:section], grown, *numbers[section + 1 :])),
        **_sizes(config, sum(depths[:section]) + place, sizes),
    )


def _sizes(config: Family, place: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The settings that have a size for each block, with one more of them at a place among all blocks."""
    values = {name: getattr(config, name) for name in (*OF_SECTIONS_OR_BLOCKS, *OF_BLOCKS) if hasattr(config, name)}
    unknown = sorted(sizes.keys() - values.keys())
    if unknown:
        raise ConfigError(
            f"the new block is given {unknown[0]}, but of family {config.TYPE!r} each block has {sorted(values)} alone"
        )
    return {name: _with_one_more(config, name, value, place, sizes.get(name)) for name, value in values.items()}


def _with_one_more(config: Family, name: str, values: tuple[int, ...], place: int, size: int | None) -> tuple[int, ...]:
    depths = config.depths
    of_sections = name not in OF_BLOCKS and len(values) == len(depths)
    if size is None and (of_sections or not values):  # it has what its section has
        return values
    if not values:
        if name not in _WHERE_EMPTY:
            raise ConfigError(
                f"the new block's {name} is {size}, but the network has no {name} for its other blocks; give it those "
                "first"
            )
        values = (_WHERE_EMPTY[name],) * sum(depths)
    each = expand_to_blocks(values, depths)
    return (*each[:place], each[place - 1] if size is None else size, *each[place:])
