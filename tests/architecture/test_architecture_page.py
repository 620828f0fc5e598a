"""ARCHITECTURE.md agrees with the tree and with the rules for imports."""

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def layers(contracts: list[dict[str, Any]]) -> list[list[str]]:
    (contract,) = [contract for contract in contracts if contract["id"] == "layers"]
    return [layer.split(" | ") for layer in contract["layers"]]


def test_the_table_has_every_package_in_its_folder() -> None:
    listed: dict[str, set[str]] = {}
    folder = ""
    for first, packages in re.findall(r"^\|([^|]*)\| ((?:`\w+`(?:, )?)+) \|[^|]*\|[^|]*\|$", PAGE, re.MULTILINE):
        folder = first.strip(" `/") or folder
        listed.setdefault(folder, set()).update(re.findall(r"`(\w+)`", packages))
    portions = {path.parent.name: path for path in ROOT.glob("*/subfleet") if path.is_dir()}
    existing = {name: {init.parent.name for init in path.glob("*/__init__.py")} for name, path in portions.items()}
    assert listed == existing


def test_the_page_has_the_layers_that_import_linter_enforces() -> None:
    (block,) = re.findall(r"^    (cli -> .*\n(?:    .*\n)*)", PAGE, re.MULTILINE)
    listed = [layer.split(" | ") for layer in " ".join(block.split()).split(" -> ")]
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert listed == layers(tool["importlinter"]["contracts"])


def test_every_folder_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", PAGE)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
