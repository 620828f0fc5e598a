"""Defects that `make mutants` plants: the file, the text and the tests of each exist."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which is not in a package."""
    spec = importlib.util.spec_from_file_location("mutants_script", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def test_every_defect_can_be_planted(mutants: ModuleType) -> None:
    defects = mutants.read_defects(mutants.DEFECTS)
    assert len(defects) >= 60
    assert list(mutants.find_misplaced(defects, ROOT)) == []


def test_every_defect_names_tests_that_exist(mutants: ModuleType) -> None:
    named = {name for defect in mutants.read_defects(mutants.DEFECTS) for name in defect.tests}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
