"""Values that a command line sets in place of a file's: `key.sub=value`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from subfleet.protocol.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["parsed", "with_override"]


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
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def with_override(plain: Any, keys: Sequence[str], value: Any) -> Any:
    """Plain settings with a value at the end of keys; tables on the way are made, items of lists go by their place.

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
    return {**plain, key: with_override(plain.get(key, {}), rest, value)}
