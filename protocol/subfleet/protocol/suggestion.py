"""Suggests a known name for a misspelled one."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """Make a clause with the closest known name, such as "; did you mean 'x'?"; "" if none is close."""
    matches = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def explain_unknown_key(key: str, known: Iterable[str]) -> str:
    """Make the clause about an unknown key, with a suggestion."""
    known = sorted(known)
    return f"is an unknown key{suggest(key, known) or f'; known are {known}'}"
