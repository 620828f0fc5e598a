"""Where a package is missing, a device is sent to what it can run: never to PyTorch, nor to what a server needs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from subfleet.protocol.exit_codes import ExitCode

HIDING = """
import contextlib, io, json, sys
hidden, commands = json.loads(sys.argv[1])
for name in hidden:
    sys.modules[name] = None  # importing it raises ImportError, as where it is not installed
from subfleet.edge_client.cli import main
done = []
for command in commands:
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
"""Words that no remedy on a device may hold; "executorch" is none of them."""


def hiding(hidden: tuple[str, ...], *commands: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command in a process without some packages."""
    arguments = [sys.executable, "-c", HIDING, json.dumps([hidden, commands])]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


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
    "hidden", [RUNTIMES, (*RUNTIMES, "PIL"), (*RUNTIMES, "numpy"), (*TORCH, "psutil"), (*TORCH, "paho")]
)
def test_no_remedy_sends_a_device_to_what_it_does_not_need(
    hidden: tuple[str, ...], models: list[str], tmp_path: Path
) -> None:
    images = tmp_path / "images" / "7"
    images.mkdir(parents=True)
    (images / "one.png").write_bytes(b"no image")
    here = ["--state", str(tmp_path / "state")]
    commands = [
        *(
            ["join", NOBODY, *here, "--data", "digits:train", "--runtime", name]
            for name in ("onnx", "executorch", "torch")
        ),
        *(
            ["join", NOBODY, *here, "--data", "digits:train", "--profile", name]
            for name in ("generic", "android_phone")
        ),
        ["join", NOBODY, *here, "--data", str(images.parent)],
        *(["predict", model, "--data", "digits:test"] for model in models),
        ["doctor", NOBODY, *here, "--data", "digits:train"],
        ["doctor", *here, "--data", str(images.parent)],
    ]
    missing = 0
    for command, (code, out, err) in zip(commands, hiding(hidden, *commands), strict=True):
        said = [line.strip() for line in (out if command[0] == "doctor" else err).splitlines()]
        missing += code == ExitCode.MISSING_EXTRA
        for line in said:
            # Before the remedy stands what is missing: that may be what somebody has asked for.
            assert SERVERS_ONLY.search(line.partition("; ")[2] or line) is None, (command, line)
        if code == ExitCode.MISSING_EXTRA and command[0] != "doctor":
            assert len(said) == 1, err
    assert missing >= 2, "nothing was missing, so that nothing was tested"


@pytest.mark.slow
def test_a_device_without_pytorch_is_told_what_runs_instead(models: list[str], tmp_path: Path) -> None:
    here = ["--state", str(tmp_path / "state"), "--data", "digits:train"]
    join = ["join", NOBODY, *here, "--runtime"]
    hidden = (*TORCH, "subfleet_executorch")
    commands = (
        [*join, "torch"],
        [*join, "executorch"],
        [*join, "onnx"],
        ["predict", models[1], "--data", "digits:test"],
    )
    torch, executorch, onnx, pte, doctor = hiding(hidden, *commands, ["doctor", *here])
    assert torch[0] == executorch[0] == pte[0] == ExitCode.MISSING_EXTRA
    assert (
        remedy_of(torch[2]) == "use ONNX Runtime, which devices have: --runtime onnx for training, and .onnx models\n"
    )
    assert remedy_of(executorch[2]).startswith(
        "install the wheel of subfleet-executorch that was built for this device"
    )
    assert pte[2] == executorch[2]
    assert onnx[0] == ExitCode.TRANSPORT, (
        "digits and ONNX Runtime need nothing of a server, so that the broker is tried"
    )
    assert doctor[0] == ExitCode.OK
    assert "1438 samples of 1x8x8 in 10 classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), for onnx" in doctor[1]


VENDORS = """
import importlib.metadata, sys
known = importlib.metadata.version
def version(name):
    if name.startswith("onnxruntime"):
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
import onnxruntime
onnxruntime.__version__ = "9.9+board"
onnxruntime.get_available_providers = lambda: ["BoardExecutionProvider", "CPUExecutionProvider"]
from subfleet.edge_client.cli import main
sys.exit(main(["doctor", "--json", "--state", sys.argv[1]]))
"""
BROKEN = 'raise ImportError("libboard.so.8: cannot open shared object file")'


def findings(out: str) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(out)["findings"]}


@pytest.mark.slow
def test_doctor_takes_a_boards_own_build_by_whatever_name_it_was_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", VENDORS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    text = findings(done.stdout)["runtimes"]["text"]
    assert "onnx (ONNX Runtime 9.9+board with BoardExecutionProvider, CPUExecutionProvider)" in text


@pytest.mark.slow
def test_doctor_is_not_content_with_a_runtime_that_is_installed_and_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text(BROKEN, encoding="utf-8")
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop()); from subfleet.edge_client.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "doctor", "--json", "--profile", "laptop", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.MISSING_EXTRA
    remedy = findings(done.stdout)["runtimes"]["remedy"]
    assert "is there, but cannot be loaded (libboard.so.8: cannot open shared object file)" in remedy
    assert "pip install" not in remedy, "it would write over the board's own build"
