"""Cases of a matrix: one for each seam in `make test`, all of them in `make test-long`."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["mostly_long"]


def mostly_long(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, of which all but the quick ones are marked as long.

    Raises:
        ValueError: a quick case is none of the cases.
    """
    cases = list(cases)
    missing = [case for case in quick if case not in cases]
    if missing:
        raise ValueError(f"{missing} are quick cases, but must be among {cases}")
    return [case if case in quick else pytest.param(case, marks=pytest.mark.long) for case in cases]
