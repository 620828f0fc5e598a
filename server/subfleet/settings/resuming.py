"""With which settings a run is taken up: those that it was begun with, but for more rounds. Pure."""

from collections.abc import Mapping
from typing import Any

from subfleet.protocol.errors import ConfigError
from subfleet.settings.changes import changed_settings

__all__ = ["check_taken_up"]


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
