"""The known name that somebody may have meant."""

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause for the end of a sentence that refuses a name: the known one that is nearest; "" where none is near."""
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
