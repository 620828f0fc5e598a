"""Values in place of a file's: those of a command line, `key.sub=value`, and those of a file that is based on it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.toml import parse_toml

__all__ = ["merged", "parsed", "spread_out", "with_override"]

_KINDS = ("type", "family", "preset")
"""Keys that say which record a table is: with another one, nothing of the table that it is based on fits."""


def parsed(text: str) -> tuple[tuple[str, ...], Any]:
    """The keys and the value of `key.sub=value`, whose value is TOML, or else text as it stands.

    Raises:
        ConfigError: it is nothing of the kind.
    """
    path, found, value = text.partition("=")
    keys = tuple(part.strip() for part in path.split("."))
    if not found or not all(keys):
        raise ConfigError(f"--set is {text!r:.200}, but must be like rounds=3 or training.learning_rate=0.1")
    try:
        return keys, parse_toml(f"value = {value}")["value"]
    except ValueError:
        return keys, value.strip()


def with_override(plain: Any, keys: Sequence[str], value: Any) -> Any:
    """Plain settings with a value at the end of keys; tables on the way are made, items of lists go by their place.

    A table that is to be of another kind keeps nothing else.

    Raises:
        ConfigError: a key leads through what is no table and no list, or to an item that is not there.
    """
    if not keys:
        return value
    key, *rest = keys
    if isinstance(plain, (list, tuple)):
        if not key.isdecimal() or int(key) >= len(plain):
            raise ConfigError(f"--set names the item {key!r}, but there are {len(plain)}, counted from 0")
        return [with_override(one, rest, value) if place == int(key) else one for place, one in enumerate(plain)]
    if not isinstance(plain, Mapping):
        raise ConfigError(f"--set names {key!r} below {plain!r:.80}, which is no table; name that key itself")
    if not rest and key in _KINDS and plain.get(key, value) != value:
        return {key: value}
    return {**plain, key: with_override(plain.get(key, {}), rest, value)}


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings with those of another file in their place: tables key by key, unless they say of which kind.

    Lists are taken as a whole.
    """
    found = dict(base)
    for key, value in own.items():
        before = base.get(key)
        joins = isinstance(before, Mapping) and isinstance(value, Mapping) and not any(kind in value for kind in _KINDS)
        found[key] = merged(before, value) if joins else value  # type: ignore[arg-type]  # they are mappings
    return found


def spread_out(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Plain settings as dotted keys and values; a table that says of which kind it is stays whole, as lists do."""
    for key, value in own.items():
        if isinstance(value, Mapping) and not any(kind in value for kind in _KINDS):
            yield from ((f"{key}.{below}", found) for below, found in spread_out(value))
        else:
            yield key, value
