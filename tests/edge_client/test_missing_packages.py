"""Where a package is missing, a device suggests what it can run: never PyTorch or the packages of a server."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from device import broken_packages as broken
from device.broken_packages import write_packages
from matrices import mostly_long
from trainers.hidden_binding import NO_BINDING

from subfleet.device.trials import TrialResult
from subfleet.edge_client import doctor
from subfleet.protocol.exit_codes import ExitCode

RUNNING = """
import contextlib, io, json, sys
from subfleet.edge_client.cli import main
done = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command)
        except SystemExit as ended:
            code = ended.code
    done.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""
TORCH = ("torch", "executorch", "onnx", "safetensors", "sklearn")
RUNTIMES = (*TORCH, "onnxruntime", "subfleet_executorch")
NOBODY = "mqtt://127.0.0.1:1"
SERVERS_ONLY = re.compile(r"\b(torch|pytorch|scikit-learn|sklearn)\b|\[(export|emulation|server|dev)\]", re.IGNORECASE)
"""Words that no remedy on a device may contain; "executorch" does not match."""


def run_without(folder: Path, hidden: tuple[str, ...], *commands: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command in a process that, like its children, lacks some packages."""
    return run_commands(write_packages(folder, {"sitecustomize.py": broken.hide_modules(*hidden)}), *commands)


def run_commands(environment: Mapping[str, str], *commands: list[str]) -> list[tuple[int, str, str]]:
    arguments = [sys.executable, "-c", RUNNING, json.dumps(commands)]
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert process.returncode == 0, process.stderr
    return [(code, out, err) for code, out, err in json.loads(process.stdout)]


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"model{suffix}" for suffix in (".onnx", ".pte", ".safetensors")]
    for path in paths:
        path.write_bytes(b"a model")
    return [str(path) for path in paths]


def remedy_of(sentence: str) -> str:
    _, mark, remedy = sentence.partition("; ")
    assert mark, sentence
    return remedy


@pytest.mark.slow
@pytest.mark.parametrize(
    "hidden",
    mostly_long(
        [(RUNTIMES,), ((*RUNTIMES, "PIL"),), ((*RUNTIMES, "numpy"),), ((*TORCH, "psutil"),), ((*TORCH, "paho"),)],
        ((*RUNTIMES, "numpy"),),
        ((*TORCH, "paho"),),
    ),
)
def test_no_remedy_names_packages_that_a_device_does_not_need(
    hidden: tuple[str, ...], models: list[str], tmp_path: Path
) -> None:
    images = tmp_path / "images" / "7"
    images.mkdir(parents=True)
    (images / "one.png").write_bytes(b"no image")
    state = ["--state", str(tmp_path / "state")]
    commands = [
        *(
            ["join", NOBODY, *state, "--data", "digits:train", "--runtime", name]
            for name in ("onnx", "executorch", "torch")
        ),
        *(
            ["join", NOBODY, *state, "--data", "digits:train", "--profile", name]
            for name in ("generic", "android_phone")
        ),
        ["join", NOBODY, *state, "--data", str(images.parent)],
        *(["predict", model, "--data", "digits:test"] for model in models),
        ["doctor", NOBODY, *state, "--data", "digits:train"],
        ["doctor", *state, "--data", str(images.parent)],
    ]
    missing = 0
    for command, (code, out, err) in zip(commands, run_without(tmp_path, hidden, *commands), strict=True):
        lines = [line.strip() for line in (out if command[0] == "doctor" else err).splitlines()]
        missing += code == ExitCode.MISSING_EXTRA
        for line in lines:
            # The text before the remedy names the missing package, which the user may have requested.
            assert SERVERS_ONLY.search(line.partition("; ")[2] or line) is None, (command, line)
        if code == ExitCode.MISSING_EXTRA and command[0] != "doctor":
            assert len(lines) == 1, err
    assert missing >= 2, "no package was missing, so the test is void"


@pytest.mark.slow
def test_without_pytorch_the_remedy_names_another_runtime(models: list[str], tmp_path: Path) -> None:
    options = ["--state", str(tmp_path / "state"), "--data", "digits:train"]
    join = ["join", NOBODY, *options, "--runtime"]
    hidden = (*TORCH, "subfleet_executorch")
    commands = (
        [*join, "torch"],
        [*join, "executorch"],
        [*join, "onnx"],
        ["predict", models[1], "--data", "digits:test"],
    )
    torch, executorch, onnx, pte, doctor = run_without(tmp_path, hidden, *commands, ["doctor", *options])
    assert torch[0] == executorch[0] == pte[0] == ExitCode.MISSING_EXTRA
    assert (
        remedy_of(torch[2]) == "use ONNX Runtime, which devices have: --runtime onnx for training, and .onnx models\n"
    )
    assert remedy_of(executorch[2]).startswith(
        "install the wheel of subfleet-executorch that was built for this device"
    )
    assert pte[2] == executorch[2]
    assert onnx[0] == ExitCode.TRANSPORT, (
        "digits and ONNX Runtime need no packages of a server, so the error is that of the broker"
    )
    assert doctor[0] == ExitCode.OK
    assert "1438 samples of 1x8x8 in 10 classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), for onnx" in doctor[1]


VENDORS = """
import importlib.metadata
known = importlib.metadata.version
def version(name):
    if name.startswith("onnxruntime"):
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
import onnxruntime
onnxruntime.__version__ = "9.9+board"
onnxruntime.get_available_providers = lambda: ["BoardExecutionProvider", "CPUExecutionProvider"]
"""


def findings(out: str) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(out)["findings"]}


@pytest.mark.slow
def test_doctor_accepts_a_boards_own_build_under_any_name(tmp_path: Path) -> None:
    board = write_packages(tmp_path, {"sitecustomize.py": VENDORS})
    ((code, out, _),) = run_commands(board, ["doctor", "--json", "--state", str(tmp_path)])
    assert code == 0, out
    text = findings(out)["runtimes"]["text"]
    assert "onnx (ONNX Runtime 9.9+board with BoardExecutionProvider, CPUExecutionProvider)" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    mostly_long(
        [
            (broken.RAISING, "libboard.so.8"),
            (broken.ABORTING, "SIGABRT"),
            (broken.DYING.format(number="SIGILL"), "SIGILL"),
        ],
        (broken.ABORTING, "SIGABRT"),
    ),
    ids=["raises", "aborts", "dies"],
)
def test_a_broken_runtime_is_reported_and_join_uses_one_that_works(tmp_path: Path, fault: str, words: str) -> None:
    pytest.importorskip("subfleet_executorch", reason=NO_BINDING)
    options = ["--state", str(tmp_path / "state"), "--data", "digits:train"]
    environment = write_packages(tmp_path, {"onnxruntime": fault})
    # Each command configures the logging of its process, so each has its own.
    ((code, out, _),) = run_commands(environment, ["doctor", *options, "--json"])
    by_check = findings(out)
    assert code == by_check["runtime onnx"]["code"] == ExitCode.MISSING_EXTRA
    assert words in by_check["runtime onnx"]["text"]
    assert "pip install" not in by_check["runtime onnx"]["remedy"], "pip would overwrite the board's own build"
    assert by_check["runtimes"]["text"].startswith("executorch (ExecuTorch")
    assert by_check["data"]["text"].endswith("for executorch")
    # The training process reports it on the standard error that both processes share.
    command = [sys.executable, "-m", "subfleet.edge_client.cli", "join", NOBODY, *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert process.returncode == ExitCode.TRANSPORT, "it fails only at the broker"
    assert process.stderr.count(words) == 1
    assert "joins fleet main with executorch" in process.stderr
    ((code, _, err),) = run_commands(environment, ["join", NOBODY, *options, "--runtime", "onnx"])
    assert code == ExitCode.MISSING_EXTRA
    assert len(err.splitlines()) == 1
    assert words in err


@pytest.mark.slow
def test_nothing_that_breaks_ends_the_doctor(tmp_path: Path) -> None:
    """NumPy, psutil and Pillow are also built for a processor, and may fail on another."""
    fault = broken.DYING.format(number="SIGILL")
    environment = write_packages(tmp_path, {"numpy": fault, "psutil": fault, "PIL": fault})
    images = tmp_path / "images" / "7"
    images.mkdir(parents=True)
    ((code, out, err),) = run_commands(environment, ["doctor", "--json", "--data", str(images.parent)])
    assert (code, err) == (ExitCode.MISSING_EXTRA, "")
    by_check = findings(out)
    assert {check for check, finding in by_check.items() if finding["code"] != ExitCode.OK} == {
        "numpy", "psutil", "Pillow", "runtimes", "runtime onnx", "runtime executorch", "memory", "data",
    }  # fmt: skip
    assert "that numpy was built with" in by_check["runtime onnx"]["text"]


@pytest.mark.slow
def test_if_no_runtime_works_one_sentence_names_each(tmp_path: Path) -> None:
    broken_both = {"onnxruntime": broken.RAISING, "subfleet_executorch": broken.DYING.format(number="SIGILL")}
    join = ["join", NOBODY, "--state", str(tmp_path / "state"), "--data", "digits:train"]
    ((code, _, err),) = run_commands(write_packages(tmp_path, broken_both), join)
    assert code == ExitCode.MISSING_EXTRA
    assert len(err.splitlines()) == 1
    assert "'onnx' does not work here: the package 'onnxruntime' is there" in err
    assert "'executorch' does not work here: this processor" in err


@pytest.mark.parametrize(("release", "is_older"), [("1.25.9", True), ("1.26.0", False), ("2.4.6", False), ("", False)])
def test_doctor_names_a_numpy_that_is_too_old(release: str, is_older: bool) -> None:
    finding = doctor.check_package("numpy", TrialResult(text=release))
    assert (finding.code != ExitCode.OK) is is_older
    assert ("1.26 or newer is needed" in finding.text) is is_older
    assert ("pip install 'subfleet[edge]', or 'numpy>=1.26" in finding.remedy) is is_older


@pytest.mark.slow
def test_the_agent_loads_without_any_tensor_package(tmp_path: Path) -> None:
    hidden = ("torch", "numpy", "onnx", "onnxruntime", "executorch", "fastapi", "PIL")
    program = (
        "import sys\n"
        "import subfleet.edge_client.joining, subfleet.edge_client.doctor, subfleet.device.capture\n"
        "from subfleet.edge_client.cli import main\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    environment = write_packages(tmp_path, {"sitecustomize.py": broken.hide_modules(*hidden)})
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert process.returncode == ExitCode.MISSING_EXTRA, process.stderr
    report = json.loads(process.stdout)
    assert report["budget_bytes"] > 0
    failed = {finding["check"] for finding in report["findings"] if finding["code"] != ExitCode.OK}
    assert failed == {"numpy", "Pillow", "runtimes"}
