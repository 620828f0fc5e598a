"""The smallest network that holds several of one family: position by position the largest width and the largest depth.

FedADP's global model (section III: "the union of all clients' architectures").
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from subfleet.elastic.building import network_of
from subfleet.elastic.network import Family
from subfleet.elastic.replication import size_in
from subfleet.protocol.errors import ConfigError

__all__ = ["union_of"]

_GROWING = frozenset(
    {"widths", "depths", "hidden_widths", "squeezed_widths", "last_widths", "stem_width", "embedding_width", "heads"}
)
"""Fields of families that say how large a network is; in all others two networks of a union must be alike."""


def union_of(families: Sequence[Family]) -> Family:
    """The settings of the smallest network of which all of these are sizes.

    Args:
        families: one or more, of one family.

    Raises:
        ConfigError: they are of several families, differ in more than sizes, list sizes of other numbers of parts, or
            are no sizes of what comes of it, as with strides that differ.
    """
    if not families:
        raise ConfigError("there are no networks to make a union of; name one or more")
    first = families[0]
    kinds = sorted({one.TYPE for one in families})
    if len(kinds) > 1:
        raise ConfigError(f"networks of the families {', '.join(kinds)} have no union; take those of one family")
    found: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(one, field.name) for one in families]
        if any(value != values[0] for value in values):
            found[field.name] = _largest(field.name, values)
    union = replace(first, **found)
    network = network_of(union)
    for one in families:
        size_in(network, network_of(one))
    return union


def _largest(name: str, values: Sequence[Any]) -> Any:
    if name not in _GROWING:
        raise ConfigError(f"the networks differ in {name}, {values[0]!r} and others, but must be alike in it")
    if isinstance(values[0], int):
        return max(values)
    if len({len(value) for value in values}) > 1:
        raise ConfigError(f"the networks' {name} name different numbers of parts, but must name as many")
    return tuple(max(parts) for parts in zip(*values, strict=True))
