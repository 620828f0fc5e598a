"""`subfleet` is a namespace package in several folders: none of them has an `__init__.py` for it."""

from pathlib import Path

import subfleet

ROOT = Path(__file__).parents[2]
PORTIONS = sorted(path.parent for path in ROOT.glob("*/subfleet") if path.is_dir())


def test_there_are_portions() -> None:
    assert {"protocol", "edge_client", "server"} <= {portion.name for portion in PORTIONS}


def test_no_portion_owns_the_namespace() -> None:
    assert list(ROOT.glob("*/subfleet/__init__.py")) == []
    assert subfleet.__file__ is None


def test_every_portion_is_part_of_the_namespace() -> None:
    assert {portion / "subfleet" for portion in PORTIONS} <= {Path(path) for path in subfleet.__path__}


def test_no_package_lies_in_two_portions() -> None:
    packages = [
        package.name
        for portion in PORTIONS
        for package in (portion / "subfleet").iterdir()
        if package.is_dir() and package.name != "__pycache__"
    ]
    assert sorted(packages) == sorted(set(packages))


def test_every_package_is_typed() -> None:
    packages = [package for portion in PORTIONS for package in (portion / "subfleet").iterdir() if package.is_dir()]
    untyped = [package for package in packages if package.name != "__pycache__" and not (package / "py.typed").exists()]
    assert untyped == []
