"""With which settings a run is taken up: those that it was begun with, but for more rounds. Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from subfleet.protocol.errors import ConfigError

__all__ = ["changed_settings", "check_taken_up"]

_MOST_CHARACTERS = 60
"""Of a value; of a longer one the part is shown that differs."""
_BEFORE = 10
_UNSET = "unset"
_TAGS = ("type", "family")
"""Each names the kind of a table: where it differs, all other keys of the table do, and they are of no interest."""


def check_taken_up(subject: str, before: Mapping[str, Any], after: Mapping[str, Any], remedy: str) -> bool:
    """Make sure that a run may be taken up with these settings.

    Args:
        subject: the run, in the words of an error.
        before: the parts of its settings that it was begun with, see `subfleet.settings.parts`.
        after: those with which it is to go on.
        remedy: what to do otherwise.

    Returns:
        Whether it is to have more rounds than it was begun with.

    Raises:
        ConfigError: another key differs, which the text names with both values; or there are fewer rounds, or more
            where what the run comes to depends on how many there are.
    """
    if before == after:
        return False
    rounds, wanted = before.get("rounds"), after.get("rounds")
    if {**before, "rounds": wanted} != after:
        changed = changed_settings(before, after)
        raise ConfigError(f"{subject} was begun with other settings, which were changed in {changed}; {remedy}")
    if not isinstance(rounds, int) or not isinstance(wanted, int) or wanted < rounds:
        raise ConfigError(
            f"{subject} was begun with rounds {rounds}, which can be raised, but not be {wanted}; {remedy}"
        )
    if after.get("norms") == "calibrated":
        raise ConfigError(
            f"{subject} was begun with rounds {rounds}, which cannot be {wanted} with norms 'calibrated': its "
            f"last round measures them; {remedy}"
        )
    return True


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Every key that differs, dotted as in TOML, with both values; such as "seed from 0 to 1".

    Args:
        before: plain settings, tables as mappings.
        after: the same of another time.
    """
    return ", ".join(_told(key, old, new) for key, old, new in _changes(before, after, ""))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    keys = [tag for tag in _TAGS if before.get(tag) != after.get(tag)] or sorted({*before, *after})
    for key in keys:
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, f"{prefix}{key}.")
        elif _text(before, key) != _text(after, key):
            yield f"{prefix}{key}", _text(before, key), _text(after, key)


def _text(settings: Mapping[str, Any], key: str) -> str:
    if key not in settings:
        return _UNSET
    return "none" if settings[key] is None else json.dumps(settings[key])


def _told(key: str, old: str, new: str) -> str:
    if max(len(old), len(new)) > _MOST_CHARACTERS:
        same = next((place for place, (one, two) in enumerate(zip(old, new, strict=False)) if one != two), 0)
        start = max(0, same - _BEFORE)
        old, new = _part(old, start), _part(new, start)
    return f"{key} from {old} to {new}"


def _part(text: str, start: int) -> str:
    end = start + _MOST_CHARACTERS
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
