"""READMEs of deployable folders, the citation and the pre-commit hooks agree with the project."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PORTIONS = sorted(path.parent for path in ROOT.glob("*/subfleet") if path.is_dir())
HOOKS = ("ruff format", "ruff check", "mypy", "lint-imports")


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


@pytest.mark.parametrize("portion", PORTIONS, ids=lambda portion: portion.name)
def test_a_deployable_folder_names_its_packages_who_installs_it_and_where_to_start(portion: Path) -> None:
    text = (portion / "README.md").read_text(encoding="utf-8")
    packages = {path.parent for path in (portion / "subfleet").rglob("__init__.py")}
    top_level = {f"subfleet.{folder.name}" for folder in packages if folder.parent.name == "subfleet"}
    named = set(re.findall(r"^\| `(subfleet[\w.]+)` \|", text, re.MULTILINE))
    assert top_level <= named
    assert named <= {".".join(folder.relative_to(portion).parts) for folder in packages}
    extras = set(re.findall(r"subfleet\[([a-z-]+)\]", text))
    assert extras <= set(project()["optional-dependencies"])
    assert "Who installs it: " in text
    assert "\nStart with " in text


def test_the_citation_has_the_version_the_licence_and_the_address_of_the_project() -> None:
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    cited = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    declared = project()
    assert (cited["cff-version"], cited["title"]) == ("1.2.0", "Subfleet")
    assert (cited["version"], cited["license"]) == (declared["version"], declared["license"])
    assert cited["repository-code"] == declared["urls"]["Homepage"]
    assert [f"  - name: {author['name']}" for author in declared["authors"]] == [
        line for line in lines if "name: " in line
    ]


def test_hooks_before_a_commit_are_those_of_make_check_and_need_no_network() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"^ +entry: \.venv/bin/(.+?)(?: --force-exclude)?$", text, re.MULTILINE)
    assert entries == list(HOOKS)
    assert re.findall(r"- repo: (\S+)", text) == ["local"]
    assert re.findall(r"language: (\S+)", text) == ["system"] * len(HOOKS)
    (checked,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in HOOKS:
        assert f"$(BIN)/{command}" in checked
