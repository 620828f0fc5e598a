"""The known name that somebody may have meant."""

import difflib
from collections.abc import Iterable

from subfleet.protocol.errors import Problem

__all__ = ["explain_unknown_key", "suggest"]


def suggest(name: str, known: Iterable[str]) -> str:
    """A clause for the end of a sentence that refuses a name: the known one that is nearest; "" where none is near."""
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def explain_unknown_key(key: str, known: Iterable[str]) -> Problem:
    """What is wrong with a key that no field has as its name, with the name that may be meant."""
    known = sorted(known)
    return Problem(text=f"is an unknown key{suggest(key, known) or f'; known are {known}'}", keys=(key,))
