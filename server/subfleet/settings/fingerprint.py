"""The settings that determine the outcome of a run, and how they may change when the run is resumed."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import to_plain

CHANGEABLE: Mapping[str, bool] = MappingProxyType({"changeable": True})
"""Metadata of a field that does not determine the outcome: it may change when a run is resumed."""
_TAGS = ("type", "family")
"""Keys that name the kind of a table: if it changes, the other keys of the table are not compared."""
_MAX_CHARACTERS = 60
_CONTEXT = 10


def select_outcome_settings(settings: Any) -> Any:
    """The settings that determine the outcome, as plain data."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        names = [field.name for field in dataclasses.fields(settings) if "changeable" not in field.metadata]
        plain: dict[str, Any] = to_plain(settings)
        tags = {key: value for key, value in plain.items() if not hasattr(settings, key) or key == "type"}
        return tags | {name: select_outcome_settings(getattr(settings, name)) for name in names if name in plain}
    if isinstance(settings, (tuple, list)):
        return [select_outcome_settings(item) for item in settings]
    return to_plain(settings)


def check_resumable(subject: str, before: Mapping[str, Any], after: Mapping[str, Any], remedy: str) -> bool:
    """Check that a run may be resumed with new settings.

    Args:
        subject: names the run in errors.
        before: outcome settings of the run.
        after: the new outcome settings.
        remedy: ends the error with what to do instead.

    Returns:
        Whether the run gets more rounds than it had.

    Raises:
        ConfigError: a setting other than the number of rounds differs; the number of rounds is lower, or is higher
            although the result depends on it.
    """
    if before == after:
        return False
    rounds, new_rounds = before.get("rounds"), after.get("rounds")
    if {**before, "rounds": new_rounds} != after:
        changes = list_changes(before, after)
        raise ConfigError(f"the settings of {subject} have changed since it was started: {changes}; {remedy}")
    if not isinstance(rounds, int) or not isinstance(new_rounds, int) or new_rounds < rounds:
        raise ConfigError(
            f"{subject} was started with rounds {rounds}, which can be raised, but not set to {new_rounds}; {remedy}"
        )
    if after.get("norms") == "calibrated":
        raise ConfigError(
            f"{subject} was started with rounds {rounds}, which cannot be set to {new_rounds} with norms 'calibrated', "
            f"because its last round measures them; {remedy}"
        )
    return True


def list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """All keys that differ, dotted as in TOML, with both values, such as "seed from 0 to 1"."""
    return ", ".join(_describe(key, old, new) for key, old, new in _find_changes(before, after, ""))


def _find_changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    keys = [tag for tag in _TAGS if before.get(tag) != after.get(tag)] or sorted({*before, *after})
    for key in keys:
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _find_changes(old, new, f"{prefix}{key}.")
        elif _format(before, key) != _format(after, key):
            yield f"{prefix}{key}", _format(before, key), _format(after, key)


def _format(settings: Mapping[str, Any], key: str) -> str:
    if key not in settings:
        return "unset"
    return "none" if settings[key] is None else json.dumps(settings[key])


def _describe(key: str, old: str, new: str) -> str:
    """Of long values only the part around the first difference is shown."""
    if max(len(old), len(new)) > _MAX_CHARACTERS:
        pairs = enumerate(zip(old, new, strict=False))
        difference = next((position for position, (left, right) in pairs if left != right), 0)
        start = max(0, difference - _CONTEXT)
        old, new = _shorten(old, start), _shorten(new, start)
    return f"{key} from {old} to {new}"


def _shorten(text: str, start: int) -> str:
    end = start + _MAX_CHARACTERS
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
