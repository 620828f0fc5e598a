"""The page of the public API agrees with the code."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from subfleet.cli.commands import app
from subfleet.edge_client import options
from subfleet.elastic.families import FAMILIES, PRESETS
from subfleet.methods import METHODS
from subfleet.protocol.messages import SCHEMA_VERSION
from subfleet.protocol.topics import Topics
from subfleet.tasks.named_dataset import DATASETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "public-api.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """A section's first table: the names in backticks in its second column by those in its first."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| `([\w.-]+)` \| (.*) \|$", section, re.MULTILINE)
    return {name: re.findall(r"`([\w.-]+)`", text) for name, text in table}


NAMES = rows("Modules and names")


@pytest.mark.parametrize("module", NAMES)
def test_every_name_that_is_promised_can_be_imported(module: str) -> None:
    imported_module = importlib.import_module(module)
    assert NAMES[module] == sorted(
        set(NAMES[module]), key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    for name in NAMES[module]:
        assert hasattr(imported_module, name), f"{module} has no {name}"
        assert name in imported_module.__all__, f"{name} is no public name of {module}"


def test_only_packages_and_public_modules_list_their_names() -> None:
    listing = [path for path in ROOT.glob("*/subfleet/**/*.py") if "\n__all__ = " in path.read_text(encoding="utf-8")]
    modules = {".".join(path.with_suffix("").parts[path.parts.index("subfleet") :]) for path in listing}
    assert {name for name in modules if not name.endswith(".__init__")} <= set(NAMES)


def test_modules_are_found_in_order() -> None:
    assert len(NAMES) > 20
    assert {module.split(".")[0] for module in NAMES} == {"subfleet"}


def test_the_entry_point_groups_are_those_of_the_project() -> None:
    groups = re.findall(r'^\[project\.entry-points\."([\w.]+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert sorted(rows("Entry points")) == sorted(groups)
    assert {registry.group for registry in (METHODS, FAMILIES, PRESETS, DATASETS)} <= set(groups)
    for names in rows("Entry points").values():
        for name in (name for name in names if name.startswith("subfleet.")):
            module, _, thing = name.rpartition(".")
            assert thing in NAMES[module], f"{name} is a signature, but not promised"


def test_the_commands_are_complete() -> None:
    documented = rows("Commands")
    group = typer.main.get_group(app)
    assert documented["subfleet"] == sorted(group.commands)
    assert documented["subfleet-edge"] == sorted(options.COMMANDS)


def test_the_versions_are_those_on_the_wire() -> None:
    versions = dict(re.findall(r"^\| (messages|topics) \(.*\) \| (\d+) \|$", PAGE, re.MULTILINE))
    assert versions["messages"] == str(SCHEMA_VERSION)
    assert Topics("main").all("round").split("/")[1] == versions["topics"]


def list_imports(folder: Path) -> Iterator[tuple[str, str]]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("subfleet."):
                yield from ((node.module or "", alias.name) for alias in node.names)


def test_a_plug_in_needs_only_public_names() -> None:
    imports = set(list_imports(ROOT / "examples" / "plugin"))
    assert len(imports) > 10
    assert [pair for pair in sorted(imports) if pair[1] not in NAMES.get(pair[0], ())] == []
