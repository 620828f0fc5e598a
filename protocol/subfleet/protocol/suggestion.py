"""Suggests the known name that was probably meant."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """Make a clause with the known name that is nearest to a wrong one; "" if none is near."""
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def explain_unknown_key(key: str, known: Iterable[str]) -> str:
    """Make the clause about an unknown key, with a suggestion."""
    known = sorted(known)
    return f"is an unknown key{suggest(key, known) or f'; known are {known}'}"
