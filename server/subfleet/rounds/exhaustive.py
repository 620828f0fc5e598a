"""What the type checker is told where no case is left."""

from typing import NoReturn

__all__ = ["never"]


def never(value: NoReturn) -> NoReturn:
    """Close a match over a union: a member that no case takes is then an error of types.

    Raises:
        AssertionError: it was reached after all.
    """
    raise AssertionError(f"{type(value).__name__} has no case here; add one")
