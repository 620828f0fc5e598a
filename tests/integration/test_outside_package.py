"""A method and a family of a package that is not ours are as good as ours; a broken package is in nobody's way.

The package is that of the recipes in `docs/how-to/`, laid out as an installed one, for processes of their own.
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
data.test = "digits:test"
rounds = 1

[method]
type = "lottery"
least = 1

[model]
family = "tower"
input_shape = [64]
class_count = 10
floors = 2
"""
BROKEN = """
[subfleet.methods]
absent = there_is_no_such_module:Absent
fedavg = tower:Tower

[subfleet.families]
lopsided = tower:Lottery
"""
READING = """
import sys
from subfleet.settings.reading import read_run
try:
    config = read_run(sys.argv[1])
    print(config.method, config.model)
except Exception as error:
    print(type(error).__name__, error)
assert "torch" not in sys.modules, "torch was loaded"
"""
ROUND = """
import sys
from dataclasses import replace
from pathlib import Path
from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.emulation.gathered import EmulatedDevice, GatheredRun
from subfleet.emulation.batch.exports import SettledExports
from subfleet.emulation.batch.run import run_batch
from subfleet.export.cache import CacheFolder
from subfleet.protocol.readings import Reading
from subfleet.settings.timing import LogClock
from subfleet.settings.reading import read_run
from subfleet.tasks import Dataset, digits

def part(place):
    whole, here = digits(), slice(40 * place, 40 * place + 40)
    return Dataset(inputs=whole.inputs[here].reshape(40, 64), labels=whole.labels[here])

def client(name, place):
    profile = DeviceProfile(name="virtual", title="A device", memory_share=1.0, runtimes=("onnx",))
    row = LogRow(t_s=0.0, reading=Reading(memory_free_bytes=10**8, downlink_bps=1e7, uplink_bps=1e6))
    log = ResourceLog(device="virtual", source="a test", licence="none", rows=(row,))
    return EmulatedDevice(client_id=name, profile=profile, data=part(place), log=log)

config = replace(read_run(sys.argv[1]), clock=LogClock(), targets=("onnx",), deploy_targets=())
clients = tuple(client(name, place) for place, name in enumerate(("ada", "bob")))
with SettledExports(CacheFolder(path=Path(sys.argv[2]))) as exports:
    result = run_batch(GatheredRun(run=config, devices=clients, evaluation=part(5)), exports)
(record,) = result.rounds
print([row.client_id for row in record.folded], len(result.model) > 0)
"""


def _python_of(page: str) -> list[str]:
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
    (lottery,), (settings, network) = _python_of("add-a-method.md"), _python_of("add-a-model-family.md")
    for name, source in (("lottery", lottery), ("tower", settings), ("tower_network", network)):
        (folder / f"{name}.py").write_text(source)
    named = "[subfleet.methods]\nlottery = lottery:Lottery\n\n[subfleet.families]\ntower = tower:Tower\n"
    _install(folder, "lottery-and-tower", named)
    return folder


@pytest.fixture(scope="module")
def broken_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    _install(folder, "broken-things", BROKEN)
    return folder


def _run(*arguments: str, packages: tuple[Path, ...]) -> str:
    paths = [*map(str, packages), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, *paths]))}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _file(folder: Path, *changes: tuple[str, str]) -> str:
    text = FILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_a_runs_file_names_them_as_it_names_ours_and_loads_no_torch(package: Path, tmp_path: Path) -> None:
    said = _run("-c", READING, _file(tmp_path), packages=(package,))
    assert said == "Lottery(least=1) Tower(input_shape=(64,), class_count=10, floors=2, width=8)\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('type = "lottery"', 'type = "lotery"', "did you mean 'lottery'?"),
        ('family = "tower"', 'family = "towr"', "did you mean 'tower'?"),
        ("least = 1", "least = -1", "method: least is -1, but must be 0 or more"),
        ("least = 1", "leest = 1", "method.leest is an unknown key; did you mean 'least'?"),
        ("floors = 2", "", "model.floors is missing"),
        ("floors = 2", "floors = 0", "is no tower; give it numbers, floors"),
    ],
)
def test_errors_are_as_clear_as_for_ours(package: Path, tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in _run("-c", READING, _file(tmp_path, (old, new)), packages=(package,))


def test_methods_of_others_are_listed_with_ours(package: Path) -> None:
    listed = json.loads(_run("-m", "subfleet.cli.main", "methods", "--json", packages=(package,)))
    assert listed["lottery"]["title"] == "Lottery"
    assert listed["lottery"]["status"] == listed["fedavg"]["status"] == "exact"


@pytest.mark.slow
@pytest.mark.export
def test_a_fleet_trains_with_both_by_a_program_of_a_worker_process(package: Path, tmp_path: Path) -> None:
    said = _run("-c", ROUND, _file(tmp_path), str(tmp_path / "programs"), packages=(package,))
    assert said == "['ada', 'bob'] True\n"
    assert list((tmp_path / "programs").glob("*.program"))


def test_a_broken_package_is_in_nobodys_way(package: Path, broken_package: Path, tmp_path: Path) -> None:
    packages = (broken_package, package)
    assert "Usage" in _run("-m", "subfleet.cli.main", "--help", packages=packages)
    assert "Lottery(least=1)" in _run("-c", READING, _file(tmp_path), packages=packages)
    listed = json.loads(_run("-m", "subfleet.cli.main", "methods", "--json", packages=packages))
    assert listed["lottery"]["status"] == "exact"
    assert listed["absent"].keys() == listed["lottery"].keys()
    absent = (
        "broken: method 'absent', which is there_is_no_such_module:Absent of package broken-things, cannot be loaded"
    )
    assert listed["absent"]["status"].startswith(absent)
    assert "is registered as" in listed["fedavg"]["status"]
    assert "uninstall all but one" in listed["fedavg"]["status"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('type = "lottery"\nleast = 1', 'type = "absent"', "ModuleNotFoundError: No module named"),
        ('type = "lottery"\nleast = 1', 'type = "fedavg"', "uninstall all but one"),
        (
            'family = "tower"',
            'family = "lopsided"',
            "family 'lopsided', which is tower:Lottery of package broken-things",
        ),
    ],
)
def test_what_is_broken_is_told_by_one_sentence_where_it_is_named(
    package: Path, broken_package: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    told = _run("-c", READING, _file(tmp_path, (old, new)), packages=(broken_package, package))
    assert told.startswith("ConfigError")
    assert said in told
    assert len(told.splitlines()) == 1


def test_help_loads_neither_torch_nor_any_package() -> None:
    program = (
        "import sys; from subfleet.cli.commands import app\n"
        "try:\n    app(['--help'], prog_name='subfleet')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'lottery', 'tower'} & set(sys.modules)\n"
    )
    assert "Usage" in _run("-c", program, packages=())
