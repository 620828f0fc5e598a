"""The words for what is wrong with a file that a person wrote, the same for every kind of file."""

from collections.abc import Iterable, Sequence

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.suggestion import did_you_mean

__all__ = ["MISSING_KEY", "refusal_of", "unknown_key"]

MISSING_KEY = "is missing, but must be there"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What is said of a key that nothing is known by, with the name that may be meant."""
    known = sorted(known)
    return f"is an unknown key{did_you_mean(key, known) or f'; known are {known}'}"


def refusal_of(what: str, problems: Sequence[str]) -> ConfigError:
    """One sentence for one problem, a list for several; `what` names the file."""
    if len(problems) == 1:
        return ConfigError(f"{what}: {problems[0]}")
    return ConfigError("\n  - ".join([f"{what} has {len(problems)} problems:", *problems]))
