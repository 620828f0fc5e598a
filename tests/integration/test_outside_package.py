"""Extensions of another package work like built-in ones; a broken package affects nothing else.

The package has the code of the recipes in `docs/how-to/`, installed for child processes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = """
name = "outside"
rounds = 1
rates = [1.0]
targets = ["onnx"]
deploy_targets = []

[method]
type = "lottery"
least = 1

[model]
family = "tower"
input_shape = [64]
class_count = 10
floors = 2

[data]
name = "waves"

[clock]

[host]
type = "batch"

[[fleet.devices]]
id = "ada"
profile = "laptop"
log = "laptop"
count = 2
"""
WAVES = """
import numpy as np
from subfleet.tasks import Dataset
from subfleet.tasks.named_dataset import NamedDataset, TrainTest

def drawn(seed, count):
    labels = np.arange(count) % 10
    inputs = np.random.default_rng(seed).random((count, 64), np.float32) + np.float32(0.1) * labels[:, None]
    return Dataset(inputs=inputs.astype(np.float32), labels=labels)

def read(paths):
    return TrainTest(train=drawn(1, 80), test=drawn(2, 40))

def waves():
    return NamedDataset(
        name="waves", summary="drawn numbers", files=(), read=read, input_shape=(64,), class_count=10,
        objective="cross_entropy", licence="none", source="Drawn by a test.",
    )

def misnamed():
    return waves()

def raising():
    raise ValueError("no waves today")
"""
BROKEN = """
[subfleet.methods]
absent = there_is_no_such_module:Absent
fedavg = tower:Tower

[subfleet.families]
lopsided = tower:Lottery

[subfleet.datasets]
lost = there_is_no_such_module:LOST
ripples = waves:misnamed
calm = waves:raising
floors = tower:Tower
digits = waves:waves
"""
# Each in one process for all its questions, so that modules are imported once.
READING = """
import json, sys
from subfleet.settings.reading import read_run
def answer(path):
    try:
        run = read_run(path)
        return f"{run.method} {run.model}"
    except Exception as error:
        return f"{type(error).__name__} {error}"
print(json.dumps([answer(path) for path in sys.argv[1:]]))
assert "torch" not in sys.modules, "torch was loaded"
"""
SAMPLES = """
import json, sys
from subfleet.tasks import read_dataset
def answer(source):
    try:
        return f"{len(read_dataset(source))}"
    except Exception as error:
        return f"{type(error).__name__} {error}"
print(json.dumps([answer(source) for source in sys.argv[1:]]))
assert "subfleet.tasks.published" not in sys.modules, "readers of ours were loaded"
"""


def _read_code(page: str) -> list[str]:
    text = (ROOT / "docs/how-to" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def _install(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    (lottery,), (settings, network) = _read_code("add-a-method.md"), _read_code("add-a-model-family.md")
    for name, source in (("lottery", lottery), ("tower", settings), ("tower_network", network)):
        (folder / f"{name}.py").write_text(source)
    (folder / "waves.py").write_text(WAVES)
    entry_points = (
        "[subfleet.methods]\nlottery = lottery:Lottery\n\n[subfleet.families]\ntower = tower:Tower\n\n"
        "[subfleet.datasets]\nwaves = waves:waves\n"
    )
    _install(folder, "lottery-and-tower", entry_points)
    return folder


@pytest.fixture(scope="module")
def broken_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    _install(folder, "broken-things", BROKEN)
    return folder


def _run(*arguments: str, packages: tuple[Path, ...], **variables: str) -> str:
    paths = [*map(str, packages), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, *paths]))}
    process = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def _ask(program: str, *questions: str, packages: tuple[Path, ...]) -> list[str]:
    """The answers of READING or SAMPLES."""
    answers: list[str] = json.loads(_run("-c", program, *questions, packages=packages))
    return answers


def _write_run_file(folder: Path, *changes: tuple[str, str]) -> str:
    text = FILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.slow
def test_a_run_names_extensions_like_built_in_ones_and_loads_no_torch(package: Path, tmp_path: Path) -> None:
    (answer,) = _ask(READING, _write_run_file(tmp_path), packages=(package,))
    assert answer == "Lottery(least=1) Tower(input_shape=(64,), class_count=10, floors=2, width=8)"


@pytest.mark.slow
def test_errors_are_as_clear_as_for_built_in_ones(package: Path, tmp_path: Path) -> None:
    cases = [
        ('type = "lottery"', 'type = "lotery"', "did you mean 'lottery'?"),
        ('family = "tower"', 'family = "towr"', "did you mean 'tower'?"),
        ("least = 1", "least = -1", "method.least is -1, but must be 0 or more"),
        ("least = 1", "leest = 1", "method.leest is an unknown key; did you mean 'least'?"),
        ("floors = 2", "", "model.floors is missing"),
        ("floors = 2", "floors = 0", "model.floors is 0, but must be 1 or more"),
    ]
    files = [_write_run_file(tmp_path / f"{index}", case[:2]) for index, case in enumerate(cases)]
    for (_, _, message), answer in zip(cases, _ask(READING, *files, packages=(package,)), strict=True):
        assert message in answer


@pytest.mark.slow
def test_methods_of_another_package_are_listed(package: Path) -> None:
    listed = json.loads(_run("-m", "subfleet.cli.main", "methods", "--json", packages=(package,)))
    assert listed["lottery"]["title"] == "Lottery"
    assert listed["lottery"]["status"] == listed["fedavg"]["status"] == "exact"


@pytest.mark.slow
@pytest.mark.export
def test_a_fleet_trains_with_all_three_by_a_program_of_a_worker_process(package: Path, tmp_path: Path) -> None:
    command = ("-m", "subfleet.cli.main", "run", _write_run_file(tmp_path), "--runs", str(tmp_path / "runs"), "--json")
    earlier = tmp_path / "programs" / "earlier.program"  # with an empty cache the exporter would load all of its tools
    earlier.parent.mkdir()
    earlier.touch()
    summary = json.loads(_run(*command, packages=(package,), SUBFLEET_CACHE=str(earlier.parent)))
    assert [row["status"] for record in summary["rounds"] for row in record["clients"]] == ["aggregated"] * 2
    assert {*earlier.parent.glob("*.program")} > {earlier}


@pytest.mark.slow
def test_a_broken_package_affects_nothing_else(package: Path, broken_package: Path, tmp_path: Path) -> None:
    packages = (broken_package, package)
    assert "Usage" in _run("-m", "subfleet.cli.main", "--help", packages=packages)
    (answer,) = _ask(READING, _write_run_file(tmp_path), packages=packages)
    assert "Lottery(least=1)" in answer
    listed = json.loads(_run("-m", "subfleet.cli.main", "methods", "--json", packages=packages))
    assert listed["lottery"]["status"] == "exact"
    assert listed["absent"].keys() == listed["lottery"].keys()
    absent = (
        "broken: method 'absent', which is there_is_no_such_module:Absent of package broken-things, cannot be loaded"
    )
    assert listed["absent"]["status"].startswith(absent)
    assert "is registered as" in listed["fedavg"]["status"]
    assert "uninstall all but one" in listed["fedavg"]["status"]


@pytest.mark.slow
def test_a_broken_extension_is_one_sentence_where_it_is_named(
    package: Path, broken_package: Path, tmp_path: Path
) -> None:
    cases = [
        ('type = "lottery"\nleast = 1', 'type = "absent"', "ModuleNotFoundError: No module named"),
        ('type = "lottery"\nleast = 1', 'type = "fedavg"', "uninstall all but one"),
        (
            'family = "tower"',
            'family = "lopsided"',
            "family 'lopsided', which is tower:Lottery of package broken-things",
        ),
    ]
    files = [_write_run_file(tmp_path / f"{index}", case[:2]) for index, case in enumerate(cases)]
    answers = _ask(READING, *files, packages=(broken_package, package))
    for (_, _, message), answer in zip(cases, answers, strict=True):
        assert answer.startswith("ConfigError")
        assert message in answer
        assert len(answer.splitlines()) == 1


@pytest.mark.slow
def test_data_sets_of_another_package_are_listed_shown_and_read(package: Path) -> None:
    command = ("-m", "subfleet.cli.main", "data")
    listed = json.loads(_run(*command, "list", "--json", packages=(package,)))
    assert (listed["waves"]["summary"], listed["waves"]["files"]) == ("drawn numbers", "installed")
    assert listed["waves"].keys() == listed["mnist"].keys()
    assert json.loads(_run(*command, "show", "waves", "--json", packages=(package,)))["train"]["samples"] == 80
    read, misspelt = _ask(SAMPLES, "waves:test", "wavs:test", packages=(package,))
    assert read == "40"
    assert "did you mean 'waves'?" in misspelt


@pytest.mark.slow
def test_a_broken_data_set_is_one_sentence_where_it_is_named(package: Path, broken_package: Path) -> None:
    cases = [
        ("lost", "ModuleNotFoundError: No module named"),
        ("ripples", "its name is 'waves', but must be 'ripples'"),
        ("calm", "ValueError: no waves today"),
        ("floors", "TypeError"),
        ("digits", "uninstall all but one"),
    ]
    packages = (package, broken_package)
    answers = _ask(SAMPLES, *(f"{name}:test" for name, _ in cases), packages=packages)
    listed = json.loads(_run("-m", "subfleet.cli.main", "data", "list", "--json", packages=packages))
    for (name, reason), answer in zip(cases, answers, strict=True):
        assert answer.startswith(f"DataError data source '{name}:test': data set '{name}'")
        assert reason in answer
        assert len(answer.splitlines()) == 1
        assert listed[name].keys() == listed["waves"].keys()
        assert listed[name]["files"] == "broken"
        assert reason in listed[name]["summary"]
    assert listed["waves"]["files"] == "installed"


@pytest.mark.slow
def test_help_loads_neither_torch_nor_any_package() -> None:
    program = (
        "import sys; from subfleet.cli.commands import app\n"
        "try:\n    app(['--help'], prog_name='subfleet')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'lottery', 'tower'} & set(sys.modules)\n"
    )
    assert "Usage" in _run("-c", program, packages=())
