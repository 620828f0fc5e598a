"""Networks by their settings in plain data: published ones by name, and those that clients bring."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, cast

from subfleet.elastic.families import AnyFamily, PublishedNorm, preset
from subfleet.elastic.network import Family
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.schema import from_plain, parse_json, to_plain

__all__ = ["Published", "brought", "network_brought", "published"]

_MOST_CHARACTERS = 4096
_LARGEST_NUMBER = 65_536
"""Of what a client says of its network: no width or size of an image is larger."""
_MOST_BLOCKS = 128
_LARGEST_SIDE = 256
_SIDES = ("kernels", "patch", "strides", "stem_stride")
"""Settings that are sides of images: whatever else is cut, a network is tried with kernels of this size."""
_TASK = ("input_shape", "class_count")
"""What all networks of a run have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What names a published network; see `subfleet.elastic.families.preset`."""

    preset: str
    input_shape: tuple[int, ...]
    class_count: int
    norm: PublishedNorm = "batch"


_KEYS = frozenset(field.name for field in fields(Published))


def published(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the network that a table's `preset` names, with what else it says in their place.

    Raises:
        ConfigError: there is no such network.
        ProtocolError: a key of `Published` is missing or wrong.
    """
    asked = from_plain(Published, {key: table[key] for key in table.keys() & _KEYS})
    network = preset(asked.preset, input_shape=asked.input_shape, class_count=asked.class_count, norm=asked.norm)
    return {**to_plain(network), **{key: value for key, value in table.items() if key != "preset"}}


def brought(table: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a network of a client's own: inputs and classes are those of `[model]` where it says none.

    Raises:
        ConfigError: it names a published network that there is not.
    """
    whole = {**{key: model[key] for key in _TASK if key in model}, **table}
    if "preset" not in whole:
        return whole
    try:
        return published(whole)
    except ProtocolError as error:
        raise ConfigError(str(error)) from error


@lru_cache(maxsize=2**12)  # each heartbeat of a client says it again
def network_brought(text: str, model: Family) -> AnyFamily:
    """The network that a client says to have. Nothing of it is built; how large its numbers are is looked at first.

    Args:
        text: what the client says: a JSON object with the keys of `[model]`.
        model: of the run, with whose inputs and classes the client's must agree.

    Raises:
        ConfigError: it is no network, one of other inputs or classes, or larger than any is.
    """
    try:
        plain = parse_json(text.encode(), max_bytes=4 * _MOST_CHARACTERS)
        if not isinstance(plain, dict):
            raise ConfigError("a network of a client's own must be a JSON object with the keys of [model]")
        if max(_numbers(plain), default=0) > _LARGEST_NUMBER:
            raise ConfigError(f"a client's network has a number above {_LARGEST_NUMBER}, which none may have")
        family: AnyFamily = from_plain(cast("Any", AnyFamily), brought(plain, to_plain(model)), "a client's network")
    except ProtocolError as error:
        raise ConfigError(str(error)) from error
    if sum(family.depths) > _MOST_BLOCKS:
        raise ConfigError(f"a client's network has {sum(family.depths)} blocks, but may have {_MOST_BLOCKS} at most")
    for key in _SIDES:
        side = max(_numbers({key: to_plain(getattr(family, key, 0))}), default=0)
        if side > _LARGEST_SIDE:
            raise ConfigError(f"a client's network has {key} of {side}, but may have {_LARGEST_SIDE} at most")
    for key in _TASK:
        if getattr(family, key) != getattr(model, key):
            raise ConfigError(
                f"a client's network has {key} {getattr(family, key)}, but the run's is {getattr(model, key)}; leave "
                "it out to take that"
            )
    return family


def _numbers(plain: Any) -> Iterator[float]:
    if isinstance(plain, Mapping):
        plain = list(plain.values())
    if isinstance(plain, list):
        for one in plain:
            yield from _numbers(one)
    elif isinstance(plain, int | float) and not isinstance(plain, bool):
        yield plain
