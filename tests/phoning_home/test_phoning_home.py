"""No command sends reports: in an isolated network it sends nothing, and writes only documented files."""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from socket import gethostname

import pytest
import typer
from phoning_home.sealing import Outcome, find_obstacle, run_sealed

from subfleet.cli.commands import app
from subfleet.edge_client import options

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broker,
    pytest.mark.export,
]


@pytest.fixture(autouse=True)
def sealed_network() -> None:
    """Skips if no isolated network can be created."""
    if reason := find_obstacle():
        pytest.skip(reason)


RUN = """
name = "tiny"
rounds = 1
rates = [1.0]
targets = ["onnx"]
deploy_targets = ["onnx"]
min_clients = 1
data = { name = "digits", test = "digits:test" }
model = { family = "mlp", input_shape = [64], class_count = 10, widths = [8], depths = [1] }
method = { type = "heterofl" }
training = { epochs = 1 }
clock = { step_s = 60.0 }
[[fleet.devices]]
id = "a"
log = "laptop"
"""
PLOTS = (".cache/matplotlib/fontlist-*.json",)
PROGRAMS = (".cache/subfleet/programs/*",)
DEVICE = (".local/state/subfleet/*",)
TRACKERS = (".cache/wandb/*",)
RUNTIMES = (".cache/subfleet/runtimes.json",)
"""Files in a home that docs/reference/environment.md documents."""
PLANTED = Path(__file__).with_name("planted.py")
BROKER = "mqtt://127.0.0.1:1883"
SERVED = f"""
mkfifo alive && exec 3<> alive
{sys.executable} -m subfleet.link.broker --port 1883 < alive 3>&- &
subfleet-edge join {BROKER} --wait --leave-when-finished --data digits:train --id a --replay laptop &
subfleet serve run.toml --broker {BROKER} --wait --http-port 0 --runs served && wait $!
"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, the documented files that it writes, and its exit code."""

    line: str
    documented: tuple[str, ...] = ()
    code: int = 0


COMMANDS = {
    command.line: command
    for command in (
        Command(line="subfleet --version"),
        Command(line="subfleet methods"),
        Command(line="subfleet examples"),
        Command(line="subfleet example quickstart"),
        Command(line="subfleet data list"),
        Command(line="subfleet data show digits"),
        Command(line="subfleet inspect run.toml"),
        Command(line="subfleet preflight run.toml"),
        Command(line="subfleet compare runs/tiny", documented=PLOTS),
        Command(line="subfleet runs list"),
        Command(line="subfleet runs show tiny"),
        Command(line="subfleet runs networks tiny"),
        Command(line="subfleet runs path tiny --random 1", code=10),  # it has no supernet
        Command(line="subfleet runs resume tiny", code=10),  # it is finished
        Command(line="subfleet runs remove tiny --runs spare --yes"),
        Command(line="subfleet-edge --version"),
        Command(line="subfleet-edge doctor --data digits:train"),
        Command(line="subfleet-edge capture --seconds 0.2 --every 0.1 --out log.csv"),
        Command(line="subfleet-edge predict model.onnx --data digits:test", documented=RUNTIMES),
    )
}
LOADING = (
    "subfleet --version",
    "subfleet-edge doctor --data digits:train",
    "subfleet-edge predict model.onnx --data digits:test",
)
"""Commands in `make test`: a minimal one, and those that load the runtimes; a run loads the exporter and matplotlib."""

TRAFFIC = {
    "connects to 203.0.113.9 port 443 (TCP)",
    "looks up at-once.example",
    "looks up at-the-end.example",
    "looks up by-a-child.example",
    "looks up by-a-thread.example",
    f"looks up {gethostname()}",
    "looks up where-there-is-a-network.example",
    "sends to 203.0.113.9 port 9999 (UDP)",
    "sends to 224.0.0.251 port 5353 (UDP)",
    *(("connects to 2001:db8:1::9 port 443 (TCP)",) if Path("/proc/net/if_inet6").exists() else ()),
}


def test_whatever_a_command_sends_or_leaves_is_a_complaint(tmp_path: Path) -> None:
    home = tmp_path / "planted" / "home"
    outcome = run_sealed(tmp_path / "planted", [sys.executable, str(PLANTED), str(home / "device-id")], linger_s=1.0)
    assert outcome.code == 0, outcome.output
    assert set(outcome.complaints()) == {*TRAFFIC, "leaves device-id"}
    assert set(outcome.complaints(["device-*"])) == TRAFFIC


def _onnx_runtime_reports() -> bool:
    return tuple(map(int, version("onnxruntime").split(".")[:2])) >= (1, 29)


@pytest.mark.skipif(not _onnx_runtime_reports(), reason="ONNX Runtime reports from 1.29 on, and this one is older")
def test_reports_of_onnx_runtime_are_detected(tmp_path: Path) -> None:
    outcome = run_sealed(tmp_path / "loud", ["subfleet-edge", "doctor"], ORT_DISABLE_TELEMETRY="0")
    assert outcome.code == 0, outcome.output
    assert any(complaint.startswith("leaves .cache/Microsoft/") for complaint in outcome.complaints()), outcome


LIBRARY_USE = """
from subfleet.device.runtimes import load_trainer
from subfleet.export.memory.onnx_run import session_options
print(load_trainer("onnx").describe_runtime(), session_options())
"""


def test_trainers_and_the_exporter_are_silent_in_a_user_program(tmp_path: Path) -> None:
    outcome = run_sealed(tmp_path / "library", [sys.executable, "-c", LIBRARY_USE])
    assert outcome.code == 0, outcome.output
    assert outcome.complaints() == ()


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of all commands, and the outcome of a run with an empty cache."""
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "work").mkdir()
    (folder / "work" / "run.toml").write_text(RUN, encoding="utf-8")
    outcome = run_sealed(folder / "run", ["subfleet", "run", "run.toml", "--host", "batch"])
    shutil.copytree(folder / "work" / "runs", folder / "work" / "spare")
    (deployed,) = (folder / "run" / "home" / ".cache" / "subfleet" / "programs").glob("*.onnx")
    shutil.copy(deployed, folder / "work" / "model.onnx")
    return folder, outcome


def run_commands(finished_run: tuple[Path, Outcome], lines: Mapping[str, Sequence[str]]) -> Mapping[str, Outcome]:
    """Run commands after that run, with its programs; two at a time, as some of them wait."""
    folder, _ = finished_run
    programs = str(folder / "run" / "home" / ".cache" / "subfleet" / "programs")

    def outcome(numbered: tuple[int, Sequence[str]]) -> Outcome:
        return run_sealed(folder / f"{len(lines)}-{numbered[0]}", numbered[1], SUBFLEET_CACHE=programs)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(lines, pool.map(outcome, enumerate(lines.values())), strict=True))


def check(commands: Iterable[Command], by_line: Mapping[str, Outcome]) -> None:
    for command in commands:
        outcome = by_line[command.line]
        assert outcome.code == command.code, f"{command.line}: {outcome.output}"
        assert outcome.complaints(command.documented) == (), command.line


def test_a_run_a_server_a_device_and_commands_on_their_results_send_no_reports(
    finished_run: tuple[Path, Outcome],
) -> None:
    """The commands that load most libraries; a single test, so that there is one run for them."""
    _, run = finished_run
    assert run.code == 0, run.output
    assert run.complaints((*PLOTS, *PROGRAMS, *RUNTIMES)) == ()
    by_line = run_commands(
        finished_run, {**{line: line.split() for line in LOADING}, "serve and join": ["sh", "-c", SERVED]}
    )
    check((COMMANDS[line] for line in LOADING), by_line)
    outcome = by_line["serve and join"]
    assert outcome.code == 0, outcome.output
    assert any(path.startswith(".local/state/subfleet/") for path in outcome.files), "the device has joined"
    assert outcome.complaints((*PLOTS, *DEVICE, *RUNTIMES)) == ()


@pytest.mark.long
def test_every_other_command_sends_no_reports(finished_run: tuple[Path, Outcome]) -> None:
    lines = {line: line.split() for line in COMMANDS if line not in LOADING}
    check((COMMANDS[line] for line in lines), run_commands(finished_run, lines))


def test_every_command_is_tested() -> None:
    lines = [*COMMANDS, "subfleet run run.toml", "subfleet serve", "subfleet-edge join", "subfleet runs replay"]
    names = [f"subfleet-edge {name}" for name in options.COMMANDS]
    for name, command in typer.main.get_group(app).commands.items():
        names += [f"subfleet {name} {subcommand}" for subcommand in getattr(command, "commands", ())] or [
            f"subfleet {name}"
        ]
    assert [name for name in names if not any(line.startswith(name) for line in lines)] == []


@pytest.mark.long
def test_processes_trackers_and_a_replay_send_no_reports(finished_run: tuple[Path, Outcome]) -> None:
    folder, _ = finished_run
    trackers = ["--name", "tracked", "--set", "observers=['mlflow', 'tensorboard', 'wandb']"]
    programs = str(folder / "run" / "home" / ".cache" / "subfleet" / "programs")
    for name, line in (("tracked", ["run", "run.toml", *trackers]), ("replayed", ["runs", "replay", "tiny"])):
        outcome = run_sealed(folder / name, ["subfleet", *line], linger_s=3.0, SUBFLEET_CACHE=programs)
        assert outcome.code == 0, outcome.output
        assert outcome.complaints((*PLOTS, *TRACKERS, *RUNTIMES)) == ()


LAB = """
from subfleet.lab import load, run
print(run(load("run.toml", "host.type=batch")))
"""


@pytest.mark.long
def test_a_run_from_python_sends_no_reports(finished_run: tuple[Path, Outcome]) -> None:
    outcome = run_sealed(finished_run[0] / "lab", [sys.executable, "-c", LAB], linger_s=3.0)
    assert outcome.code == 0, outcome.output
    assert outcome.complaints((*PLOTS, *PROGRAMS, *RUNTIMES)) == ()


# Weights & Biases is missing: it reports only its own crashes, which a test cannot cause.
USES = {
    "flwr_datasets": "from flwr_datasets.common import EventType, event; event(next(iter(EventType))).result()",
    "huggingface_hub": "from huggingface_hub.utils import send_telemetry; send_telemetry('x')",
    "mlflow": "import mlflow; mlflow.set_tracking_uri('sqlite:///m.db'); mlflow.start_run()",
    "onnxruntime": "import onnxruntime",
}
LINGER_S = {"onnxruntime": 30.0}
"""ONNX Runtime begins to upload after some ten seconds."""


@pytest.mark.long
@pytest.mark.parametrize("library", USES)
def test_a_library_reports_until_it_is_silenced(library: str, tmp_path: Path) -> None:
    silent = "import os; from subfleet.protocol.silence import silence; silence(os.environ)"
    loud = run_sealed(tmp_path / "loud", [sys.executable, "-c", USES[library]], linger_s=LINGER_S.get(library, 2.0))
    assert loud.code == 0, loud.output
    assert loud.traffic != (), "the library no longer reports, or does so in another way"
    quiet = run_sealed(
        tmp_path / "silent", [sys.executable, "-c", f"{silent}\n{USES[library]}"], linger_s=LINGER_S.get(library, 2.0)
    )
    assert quiet.code == 0, quiet.output
    assert quiet.traffic == ()
