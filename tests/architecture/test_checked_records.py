"""Bounds in the annotations of a record are worth something where the record checks itself."""

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import pytest

PACKAGES = ("protocol", "device_profiles", "agent", "search", "methods", "settings", "elastic.families.records")


def bounded(kind: Any) -> bool:
    """Whether an annotation has a bound, also inside."""
    bounds = getattr(kind, "__metadata__", ())
    return any(hasattr(one, "problem") for one in bounds) or any(map(bounded, typing.get_args(kind)))


def records(package: str) -> Iterator[type]:
    """The dataclasses of a package."""
    found = importlib.import_module(f"subfleet.{package}")
    for info in pkgutil.iter_modules(found.__path__, f"{found.__name__}."):
        module = importlib.import_module(info.name)
        for kind in vars(module).values():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == info.name:
                yield kind


@pytest.mark.parametrize("package", PACKAGES)
def test_records_with_bounds_check_themselves(package: str) -> None:
    kinds = list(records(package))
    assert kinds
    for kind in kinds:
        try:
            hints = typing.get_type_hints(kind, include_extras=True)
        except NameError:  # of tensors, whose package is not loaded: plain data have none, and cannot be made so
            continue
        if any(bounded(hints[field.name]) for field in dataclasses.fields(kind)):
            assert hasattr(kind, "__rules__"), kind
