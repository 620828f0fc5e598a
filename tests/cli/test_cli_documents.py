"""The documentation agrees with the code."""

import dataclasses
import re
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType

import pytest
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.elastic.families import FAMILIES
from subfleet.protocol.errors import FileError
from subfleet.serving.run_context import create_context
from subfleet.settings.named_networks import ModuleSettings
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run
from subfleet.tasks import read_dataset

ROOT = Path(__file__).resolve().parents[2]


REQUIRED = {"input_shape", "class_count", "widths", "depths"}


def _list_tables(kind: type, table: str = "") -> Iterator[tuple[str, type]]:
    """The records of a run file with the names of their tables; the file itself has the name ""."""
    yield table, kind
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        named = typing.get_args(hints[field.name]) or (hints[field.name],)
        members = [member for member in named if member not in (NoneType, Ellipsis)]
        if len(members) == 1 and isinstance(members[0], type) and dataclasses.is_dataclass(members[0]):
            yield from _list_tables(members[0], f"{table}.{field.name}".lstrip("."))


def _read_rows(page: str) -> Mapping[str, list[tuple[str, str]]]:
    """Keys and rows of the tables of keys on the page, by the name in the heading above."""
    sections = re.split(r"^#+ `\[+([\w.]+)\]+`$", page, flags=re.MULTILINE)
    by_table: dict[str, list[tuple[str, str]]] = {}
    for name, text in zip(["", *sections[1::2]], sections[::2], strict=True):
        _, *tables = re.split(r"^\| key \| default \| meaning \|$", text, flags=re.MULTILINE)
        rows = [line for table in tables for line in table.split("\n\n")[0].splitlines() if line.startswith("| `")]
        by_table[name] = [(key, row) for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    return by_table


def test_every_configuration_key_is_documented_exactly_once() -> None:
    rows = dict(_read_rows((ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")))
    assert rows.pop("sweep") == [], "a sweep makes several runs of a file, and is not part of a run"
    elsewhere = {
        f"{table}.{key}".lstrip(".")
        for table, table_rows in rows.items()
        for key, row in table_rows
        if re.search(rf"\]\(({'methods|submodels' if table else 'methods|rounds|tasks'})\.md", row)
    }
    tables = {table: kind for table, kind in _list_tables(Run) if table not in elsewhere}
    tables |= {table: kind for table, kind in _list_tables(ModuleSettings, "model") if table != "model"}
    assert set(rows) == {*tables, "model"}
    settings = {field.name for family in FAMILIES.values() for field in dataclasses.fields(family)}
    assert sorted(key for key, _ in rows["model"]) == sorted({"family", *settings})
    for table, kind in tables.items():
        nested = {name.removeprefix(f"{table}.") for name in tables if table and name.startswith(f"{table}.")}
        # The seed of the run replaces training.seed.
        keys = [
            field.name for field in dataclasses.fields(kind) if field.name not in nested | {"seed" if table else ""}
        ]
        assert sorted(key for key, _ in rows[table] if key not in nested) == sorted(keys), table


def test_every_family_is_documented_exactly_once_with_its_settings() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    table = page.split("| family | network |")[1].split("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[2:]]
    documented = [
        (name, set(re.findall(r"`(\w+)`", row[3]))) for row in rows for name in re.findall(r"`(\w+)`", row[1])
    ]
    assert sorted(name for name, _ in documented) == sorted(FAMILIES)
    for name, settings in documented:
        assert settings == {field.name for field in dataclasses.fields(FAMILIES[name])} - REQUIRED, name


def test_the_example_configuration_needs_no_files_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUBFLEET_DATA", raising=False)
    config = read_run("fleet")
    samples = read_dataset(config.data.evaluated_on)
    assert samples.sample_shape == config.model.input_shape == read_dataset("digits:train").sample_shape
    assert int(samples.labels.max()) == config.model.class_count - 1
    assert len(create_context(config, "run").first.candidates) > 4
    result = CliRunner().invoke(app, ["example"])
    Path("mine.toml").write_text(result.stdout, encoding="utf-8")
    assert read_run(Path("mine.toml")) == config


def test_an_unknown_configuration_is_answered_with_the_included_ones() -> None:
    with pytest.raises(FileError, match=r"or one of \[.*'fleet', .*'quickstart'.*\]; did you mean 'fleet'"):
        read_run("fleat")


@pytest.mark.slow
def test_links_lead_somewhere() -> None:
    result = subprocess.run(
        [sys.executable, "scripts/check_links.py"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stdout
