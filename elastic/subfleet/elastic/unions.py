"""The union of networks: the smallest network that has all of them as submodels.

This is FedADP's global model (section III: "the union of all clients' architectures"): the largest width of each axis,
and all blocks. Blocks are matched by name. If layers of any network have widths of their own, so do those of the union.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from subfleet.elastic.building import network_of, record_of
from subfleet.elastic.families.records.checks import expand_to_blocks
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.growing import describe_recorded
from subfleet.elastic.network import Family
from subfleet.elastic.recording.uniting import unite_records
from subfleet.elastic.replication import size_in
from subfleet.protocol.errors import ConfigError


def unite_families(families: Sequence[Family]) -> Family:
    """The settings of the smallest network that has all of these as submodels: one of them, or a recorded one.

    Args:
        families: settings of at least one network, all of one family.

    Raises:
        ConfigError: there are several families, or networks that differ in more than sizes and numbers of parts, so
            that one is not a submodel of the union.
    """
    if not families:
        raise ConfigError("a union needs at least one network")
    kinds = sorted({family.TYPE for family in families})
    if len(kinds) > 1 and "recorded" not in kinds:
        raise ConfigError(f"networks of the families {', '.join(kinds)} have no union; use networks of one family")
    alike = _set_layer_widths(families)
    record = unite_records([record_of(family) for family in alike])
    whole = {axis.name: axis.size for axis in record.axes}
    same = (
        family
        for family in alike
        if {axis.name: axis.size for axis in record_of(family).axes} == whole
        and len(record_of(family).blocks) == len(record.blocks)
    )
    union = next(same, None) or describe_recorded(families[0], record)
    for family in families:
        size_in(network_of(union), network_of(family))
    return union


def _has_layer_widths(family: Any) -> bool:
    if isinstance(family, Recorded):
        return any(block.reads != block.gives for block in family.record().blocks if not block.kept)
    return bool(getattr(family, "layer_widths", ()))


def _set_layer_widths(families: Sequence[Any]) -> list[Any]:
    """The networks, with a width for each layer if any of them has that."""
    if not any(map(_has_layer_widths, families)):
        return list(families)
    return [
        family
        if getattr(family, "layer_widths", True)
        else replace(family, layer_widths=expand_to_blocks(family.widths, family.depths))
        for family in families
    ]
