"""The extent of parametrised tests: selected cases and few examples in `make test`, all in `make test-long`."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["SHORT_EXAMPLES", "crossed", "examples", "mostly_long"]

SHORT_EXAMPLES = 30
"""Examples of a property test in `make test`, the same in every run."""


def examples(count: int, **options: Any) -> settings:
    """Settings of a property test with this many examples in `make test`, and ten times as many in `make test-long`.

    Args:
        count: examples in `make test`.
        options: other settings of Hypothesis.
    """
    return settings(max_examples=count * settings().max_examples // SHORT_EXAMPLES, **options)


def mostly_long(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases for `pytest.mark.parametrize`; all but the quick ones are marked as long.

    A tuple is a case of several arguments.

    Raises:
        ValueError: a quick case is not among the cases.
    """
    cases = list(cases)
    missing = [case for case in quick if case not in cases]
    if missing:
        raise ValueError(f"{missing} are quick cases, but must be among {cases}")
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*value, marks=() if case in quick else pytest.mark.long)
        for case, value in zip(cases, values, strict=True)
    ]


def crossed(cases: Iterable[str], targets: Iterable[str], *on_all: str) -> list[Any]:
    """Each case with each target, as pairs, for properties of the step that all targets share.

    `make test` takes all cases with the first target, and with the other targets only those of `on_all`.

    Raises:
        ValueError: one of `on_all` is not among the cases.
    """
    cases, targets = list(cases), list(targets)
    missing = [case for case in on_all if case not in cases]
    if missing:
        raise ValueError(f"{missing} are cases for all targets, but must be among {cases}")
    return [
        pytest.param(case, target, marks=() if target == targets[0] or case in on_all else pytest.mark.long)
        for target in targets
        for case in cases
    ]
