"""The example plug-in, built and installed with Subfleet in a new environment, without changes to the repository.

Everything is installed from wheels: neither this checkout nor an editable install of it is on a path.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from subfleet.export.cache import CacheFolder
from subfleet.link.broker import EmbeddedBroker

pytestmark = [pytest.mark.slow, pytest.mark.export]

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"
SHORT = ("--set", "rounds=1", "--set", "training.epochs=1")
LIMIT_S = 240


class FreshEnvironment:
    """An environment with the dependencies of the tests and the wheels of Subfleet and the plug-in."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self.bin = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        # Without PYTHONPATH: else the modules of this checkout would be imported.
        self.variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.variables |= {"SUBFLEET_CACHE": str(programs), "XDG_CACHE_HOME": str(folder / "cache")}

    def run(self, command: str, *arguments: str, cwd: Path | None = None) -> str:
        process = subprocess.run(
            [str(self.bin / command), *arguments],
            env=self.variables, cwd=cwd or self.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    @contextmanager
    def start(self, command: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
        with subprocess.Popen(
            [str(self.bin / command), *arguments],
            env=self.variables, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()


def _build_wheel(source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    process = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, cache: CacheFolder) -> FreshEnvironment:
    pytest.importorskip("hatchling")
    pytest.importorskip("pip")
    environment = FreshEnvironment(tmp_path_factory.mktemp("fresh"), cache.path)
    wheels = [_build_wheel(ROOT, environment.folder / "ours"), _build_wheel(PLUGIN, environment.folder / "theirs")]
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment.folder / "env")], check=True, timeout=120
    )
    # With the environment's own Python, which sees no other installation yet.
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    python = str(environment.bin / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *options, *map(str, wheels)]
    process = subprocess.run(pip, env=environment.variables, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    site = environment.run("python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    shared = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    # After its own packages, and without the .pth files of these folders, such as those of an editable install.
    (Path(site) / "shared.pth").write_text("\n".join(sorted(shared)) + "\n")
    return environment


def test_modules_are_imported_from_the_wheels(fresh: FreshEnvironment) -> None:
    output = fresh.run("python", "-c", "import subfleet.methods, subfleet_example; print(subfleet.methods.__file__)")
    assert output.startswith(str(fresh.folder))
    search_path = fresh.run("python", "-c", "import sys; print(*sys.path, sep='\\n')").splitlines()
    assert not {str(ROOT / folder) for folder in ("protocol", "server", "emulation")} & set(search_path)


def test_extensions_of_the_plug_in_are_listed(fresh: FreshEnvironment) -> None:
    methods = json.loads(fresh.run("subfleet", "methods", "--json"))
    assert methods["steady"] == {**methods["fedavg"], **methods["steady"]}
    assert (methods["steady"]["title"], methods["steady"]["status"]) == ("Steady", "exact")
    assert not [name for name, row in methods.items() if row["status"].startswith("broken")]
    assert json.loads(fresh.run("subfleet", "data", "list", "--json"))["ridges"]["files"] == "installed"
    shown = json.loads(fresh.run("subfleet", "data", "show", "ridges", "--json"))
    assert (shown["train"]["samples"], shown["test"]["samples"]) == (400, 100)


@pytest.mark.long
@pytest.mark.parametrize("host", ["batch", pytest.param("processes", marks=pytest.mark.broker)])
def test_the_run_of_the_plug_in_ends_on_every_host(fresh: FreshEnvironment, host: str) -> None:
    file, runs = str(PLUGIN / "run.toml"), str(fresh.folder / host)
    summary = json.loads(fresh.run("subfleet", "run", file, "--host", host, "--runs", runs, *SHORT, "--json"))
    assert [row["status"] for record in summary["rounds"] for row in record["clients"]] == ["aggregated"] * 2
    assert (fresh.folder / host / "ridges" / "model.safetensors").stat().st_size > 0


@pytest.mark.broker
def test_the_run_of_the_recipe_is_served_to_a_device(fresh: FreshEnvironment) -> None:
    page = (ROOT / "docs" / "how-to" / "make-a-plugin.md").read_text(encoding="utf-8")
    _, file = re.findall(r"^   ```toml\n(.*?)^   ```$", page, re.MULTILINE | re.DOTALL)
    (fresh.folder / "recipe.toml").write_text(textwrap.dedent(file))
    runs = str(fresh.folder / "served")
    alone = (*SHORT, "--set", "min_clients=1", "--runs", runs, "--http-port", "0")
    device = ("--id", "laptop", "--data", "ridges:train", "--profile", "laptop", "--replay", "laptop")
    with (
        EmbeddedBroker() as broker,
        fresh.start("subfleet", "serve", "recipe.toml", "--broker", broker.url, *alone) as server,
        fresh.start(
            "subfleet-edge", "join", broker.url, *device, "--state", str(fresh.folder / "device"),
            "--leave-when-finished",
        ) as joined,
    ):  # fmt: skip
        server_output, _ = server.communicate(timeout=LIMIT_S)
        assert server.returncode == 0, server_output
        device_output, _ = joined.communicate(timeout=60)
        assert joined.returncode == 0, device_output
    (folder,) = (fresh.folder / "served").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert "<h2>Each device's own model</h2>" in (folder / "report.html").read_text(encoding="utf-8")
    assert [row["status"] for record in summary["rounds"] for row in record["clients"]] == ["aggregated"]


@pytest.mark.long
def test_the_tests_of_the_plug_in_pass(fresh: FreshEnvironment) -> None:
    shutil.copytree(PLUGIN / "tests", fresh.folder / "own" / "tests")
    output = fresh.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=fresh.folder / "own")
    assert " passed" in output
    assert " failed" not in output
