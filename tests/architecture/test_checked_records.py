"""Every record with bounds in its annotations checks them when it is created."""

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import pytest

PACKAGES = ("protocol", "device_profiles", "agent", "search", "methods", "settings", "elastic.families.records")


def has_bound(kind: Any) -> bool:
    """Whether an annotation or one of its arguments has a bound."""
    bounds = getattr(kind, "__metadata__", ())
    return any(hasattr(bound, "problem") for bound in bounds) or any(map(has_bound, typing.get_args(kind)))


def records(package: str) -> Iterator[type]:
    """The dataclasses of a package."""
    parent = importlib.import_module(f"subfleet.{package}")
    for info in pkgutil.iter_modules(parent.__path__, f"{parent.__name__}."):
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
        except NameError:  # an annotation of tensors, which a record of plain data cannot have
            continue
        if any(has_bound(hints[field.name]) for field in dataclasses.fields(kind)):
            assert hasattr(kind, "__rules__"), kind
