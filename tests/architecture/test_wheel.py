"""The wheel has every file that the commands need, and names its authors."""

import configparser
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from subfleet.elastic.families import FAMILIES, PRESETS
from subfleet.methods import METHODS
from subfleet.tasks.named_dataset import DATASETS

ROOT = Path(__file__).parents[2]
SHIPPED = (
    "subfleet/settings/runs/fleet.toml",
    "subfleet/settings/runs/quickstart.toml",
    "subfleet/tasks/data/digits.npz",
    "subfleet/tasks/data/NOTICE.digits",
    "subfleet/device/trial_files/data.npz",
    "subfleet/device/trial_files/executorch.program",
    "subfleet/device/trial_files/expected.json",
    "subfleet/device/trial_files/onnx.program",
    "subfleet/device/trial_files/weights.safetensors",
    "subfleet/device_profiles/data/raspberry_pi_4.toml",
    "subfleet/device_profiles/data/logs/raspberry_pi_4.csv",
)
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from subfleet.settings.reading import read_included_run
from subfleet.tasks import read_dataset
print(read_included_run("fleet").count("digits:test"), len(read_dataset("digits:test")))
loaded = [module.__file__ for name, module in sys.modules.items() if name.startswith("subfleet.")]
assert all(path.startswith(sys.argv[1]) for path in loaded if path), loaded
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    (built,) = folder.glob("*.whl")
    return built


def _read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8"))


@pytest.mark.slow
def test_the_wheel_names_its_authors_and_urls(wheel: Path) -> None:
    metadata = _read_metadata(wheel)
    assert metadata["Author"] == "The Subfleet authors"
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith("https://github.com/subfleet/subfleet") for url in urls.values())


@pytest.mark.slow
def test_the_extra_for_boards_with_their_own_builds_has_no_runtime_and_no_numpy(wheel: Path) -> None:
    requirements = _read_metadata(wheel).get_all("Requires-Dist", [])
    bare, edge = (
        {re.split(r"[<>=\[; ]", line)[0] for line in requirements if f"extra == '{extra}'" in line}
        for extra in ("edge-bare", "edge")
    )
    assert bare == {"paho-mqtt", "psutil", "pillow"}
    assert edge == bare | {"numpy", "onnxruntime"}


@pytest.mark.slow
def test_the_wheel_has_every_file_that_a_name_stands_for(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert set(SHIPPED) <= set(archive.namelist())


@pytest.mark.slow
def test_the_wheel_registers_our_methods_families_networks_and_data_and_has_their_modules(wheel: Path) -> None:
    registered = configparser.ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (name,) = (name for name in files if name.endswith(".dist-info/entry_points.txt"))
        registered.read_string(archive.read(name).decode("utf-8"))
    groups = {group: dict(registered[group]) for group in registered if group.startswith("subfleet.")}
    kinds = {f"subfleet.{group}" for group in ("trainers", "methods", "families", "presets", "datasets", "observers")}
    assert set(groups) == kinds
    for value in (value for names in groups.values() for value in names.values()):
        assert value.partition(":")[0].replace(".", "/") + ".py" in files, value
    for registry in (METHODS, FAMILIES, PRESETS, DATASETS):
        assert set(groups[registry.group]) <= set(registry.names), "install the checkout again: it has new entry points"


@pytest.mark.slow
def test_the_example_is_read_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "site")],
        capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, "1 359\n"), process.stderr
