"""Closes a match over a union, so that the type checker reports a missing case."""

from typing import NoReturn


def never(value: NoReturn) -> NoReturn:
    """Mark the last case of a match: a union member without a case becomes a type error.

    Raises:
        AssertionError: the case was reached after all.
    """
    raise AssertionError(f"{type(value).__name__} has no case here; add one")
