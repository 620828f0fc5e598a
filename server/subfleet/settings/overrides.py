"""Settings that replace those of a file: `key.sub=value` on a command line, or a file with a `base`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.toml import parse_toml

_KINDS = ("type", "family", "preset", "module")
"""Keys that name the kind of a table: a table of another kind replaces the old one as a whole."""


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """The keys and the value of `key.sub=value`. A value that is not TOML is taken as text.

    Raises:
        ConfigError: the text does not have this form.
    """
    path, separator, value = text.partition("=")
    keys = tuple(part.strip() for part in path.split("."))
    if not separator or not all(keys):
        raise ConfigError(f"--set is {text!r:.200}, but must be like rounds=3 or training.learning_rate=0.1")
    try:
        return keys, parse_toml(f"value = {value}")["value"]
    except ValueError:
        return keys, value.strip()


def apply_override(plain: Any, keys: Sequence[str], value: Any) -> Any:
    """Plain settings with a value set. Missing tables are created; a key of a list is an index.

    Raises:
        ConfigError: a key leads through a value that is neither a table nor a list, or an index is out of range.
    """
    if not keys:
        return value
    key, *rest = keys
    if isinstance(plain, (list, tuple)):
        if not key.isdecimal() or int(key) >= len(plain):
            raise ConfigError(f"--set names the item {key!r}, but there are {len(plain)}, counted from 0")
        return [apply_override(item, rest, value) if index == int(key) else item for index, item in enumerate(plain)]
    if not isinstance(plain, Mapping):
        raise ConfigError(f"--set names {key!r} below {plain!r:.80}, which is not a table; name that key itself")
    if not rest and key in _KINDS and plain.get(key, value) != value:
        return {key: value}
    return {**plain, key: apply_override(plain.get(key, {}), rest, value)}


def merge_settings(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings with those of another file merged in. Lists, and tables that name their kind, are replaced."""
    merged = dict(base)
    for key, value in own.items():
        before = base.get(key)
        joins = isinstance(before, Mapping) and isinstance(value, Mapping) and not any(kind in value for kind in _KINDS)
        merged[key] = merge_settings(before, value) if joins else value  # type: ignore[arg-type]  # they are mappings
    return merged


def flatten_settings(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Plain settings as dotted keys and values. Lists, and tables that name their kind, are not flattened."""
    for key, value in own.items():
        if isinstance(value, Mapping) and not any(kind in value for kind in _KINDS):
            yield from ((f"{key}.{below}", nested) for below, nested in flatten_settings(value))
        else:
            yield key, value
