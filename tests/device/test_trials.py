"""Runtimes and packages that fail on import or in training: each is one finding, and ends only its own process."""

import json
import signal
from pathlib import Path

import pytest
from device import broken_packages as broken
from device.broken_packages import write_packages
from export.oldest import OLDEST, needs_oldest
from trainers.hidden_binding import NO_BINDING, hide_binding

from subfleet.device.runtimes import try_once
from subfleet.device.trials import TrialResult, explain_death, try_packages, try_runtime
from subfleet.protocol.exit_codes import ExitCode

pytestmark = pytest.mark.slow

CASES = (
    (
        broken.DYING.format(number="SIGILL"),
        "lacks an instruction that onnxruntime was built with (SIGILL) while it was being",
    ),
    (broken.DYING.format(number="SIGSEGV"), "onnxruntime accessed invalid memory (SIGSEGV)"),
    (broken.DYING.format(number="SIGKILL"), "it was killed (SIGKILL), probably because memory ran out"),
    (broken.DYING.format(number="SIGUSR1"), f"it was terminated by signal {int(signal.SIGUSR1)}"),
    (broken.ABORTING, "onnxruntime aborted (SIGABRT: terminate called: no such device)"),
    (broken.LEAVING, "its process ended with exit code 3 while it was being loaded (no licence)"),
    (broken.RAISING, "cannot be loaded (ImportError: libboard.so.8: cannot open shared object file)"),
    (broken.FOR_NUMPY_1, "cannot be loaded (AttributeError: _ARRAY_API not found)"),
    (broken.FOR_A_NEWER_NUMPY, "module compiled against API version 0xe"),
    (broken.DYING_AS_IT_TRAINS, "(SIGILL) while it was being trained with"),
    (broken.RAISING_AS_IT_TRAINS, "training with it failed: ONNX Runtime refused the program (Numpy is not available)"),
    (broken.WRONG_AS_IT_TRAINS, "this build computes wrong results"),
)
REMEDIES = {
    "SIGILL": "that build is for a newer processor; install another build of onnxruntime",
    "SIGKILL": "free some memory",
    "_ARRAY_API": "run: pip install 'numpy>=1.26,<2'",
    "0xe": "run: pip install --upgrade numpy",
    "libboard": "install the libraries that this build of it needs",
}


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that child processes find before the real ones."""
    for name, value in write_packages(tmp_path, {}).items():
        monkeypatch.setenv(name, value)
    # A child uses the search path of its parent, which is already running.
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    return tmp_path


@pytest.mark.parametrize(("fault", "words"), CASES, ids=[words[:30] for _, words in CASES])
def test_a_broken_runtime_is_a_finding_with_its_remedy(package_folder: Path, fault: str, words: str) -> None:
    write_packages(package_folder, {"onnxruntime": fault})
    trial = try_runtime("onnx", "cpu")
    assert trial.broken, trial
    assert trial.code == ExitCode.MISSING_EXTRA
    assert words in trial.sentence
    assert trial.remedy
    assert len(trial.sentence.splitlines()) == 1
    for mark, remedy in REMEDIES.items():
        assert mark not in words or remedy in trial.remedy


@pytest.mark.parametrize("number", sorted(signal.valid_signals() - {0}))
def test_every_signal_that_ends_a_child_has_a_sentence(number: int) -> None:
    dump = (
        "Fatal Python error: X\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed\n'
        '  File "/venv/lib/site-packages/subfleet/trainers/onnx.py", line 3 in _open\n'
        '  File "/venv/lib/python3/dist-packages/numpy/core/__init__.py", line 2 in <module>\n'
        '  File "/venv/lib/site-packages/onnxruntime/__init__.py", line 2 in <module>\n'
    )
    trial = explain_death(-number, dump, "loaded", "the runtime")
    assert trial.broken
    assert trial.text.endswith("while it was being loaded")
    assert "{" not in trial.sentence
    assert "numpy" in trial.sentence or number == signal.SIGKILL or f"signal {number}" in trial.text
    assert "numpy" not in explain_death(-number, "", "loaded", "the runtime").sentence


def test_a_runtime_that_hangs_is_given_up(package_folder: Path) -> None:
    write_packages(package_folder, {"onnxruntime": broken.HANGING})
    trial = try_runtime("onnx", "cpu", deadline_s=2.0)
    assert (trial.broken, trial.text) == (True, "it did not finish within 2 s while it was being loaded")


def test_a_package_that_is_missing_is_not_broken(package_folder: Path) -> None:
    write_packages(package_folder, {"sitecustomize.py": broken.hide_modules("onnxruntime", "psutil")})
    for trial in (try_runtime("onnx", "cpu"), try_packages({"psutil": "psutil"})["psutil"]):
        assert (trial.works, trial.broken, trial.code) == (False, False, ExitCode.MISSING_EXTRA)
        assert "pip install 'subfleet[edge]'" in trial.remedy


def test_output_of_a_package_does_not_disturb_the_trial(package_folder: Path) -> None:
    write_packages(package_folder, {"psutil": "import os\nprint('hello')\nos.write(1, b'{}')\nversion_info = ()\n"})
    assert try_packages({"psutil": "psutil"})["psutil"].works


def test_a_package_that_ends_its_process_leaves_the_trials_of_the_others(package_folder: Path) -> None:
    write_packages(package_folder, {"broken_board": broken.ABORTING, "broken_chip": broken.RAISING})
    modules = {
        "json": "json",
        "chip": "broken_chip",
        "board": "broken_board",
        "last": "broken_board",
        "psutil": "psutil",
    }
    results = try_packages(modules)
    assert list(results) == list(modules)
    assert [result.works for result in results.values()] == [True, False, False, False, True]
    assert "broken_board aborted (SIGABRT: terminate called: no such device)" in results["board"].text
    assert "broken_board aborted" in results["last"].text
    assert "libboard.so.8" in results["chip"].text


def test_every_installed_runtime_trains_as_pytorch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_runtime("onnx", "cpu").text.startswith("ONNX Runtime")
    pytest.importorskip("executorch")
    hide_binding(tmp_path, monkeypatch)
    assert try_runtime("executorch", "cpu").text.endswith("with PyTorch")


def test_the_native_binding_trains_as_pytorch_does() -> None:
    pytest.importorskip("subfleet_executorch", reason=NO_BINDING)
    trial = try_runtime("executorch", "cpu")
    assert trial.works, trial
    assert "PyTorch" not in trial.text


@needs_oldest
def test_the_oldest_onnx_runtime_trains_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OLDEST))
    assert try_runtime("onnx", "cpu").text.startswith("ONNX Runtime 1.23.2 ")


def test_a_successful_trial_is_not_repeated_until_a_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[tuple[str, str]] = []
    file = tmp_path / "cache" / "runtimes.json"
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))

    def try_runtime_once(name: str, provider: str = "cpu", *, works: bool = True) -> bool:
        def attempt(name: str, provider: str) -> TrialResult:
            attempts.append((name, provider))
            return TrialResult(text="it") if works else TrialResult(code=ExitCode.MISSING_EXTRA, text="no")

        return try_once(name, provider, file=file, attempt=attempt).works

    assert try_runtime_once("onnx")
    assert try_runtime_once("onnx")
    assert try_runtime_once("onnx", "cuda")
    assert try_runtime_once("torch")
    assert attempts == [("onnx", "cpu"), ("onnx", "cuda"), ("torch", "cpu")]
    assert try_runtime_once("onnx"), "later results replace no earlier ones"
    assert not try_runtime_once("executorch", works=False)
    assert not try_runtime_once("executorch", works=False)
    assert attempts[3:] == [("executorch", "cpu")] * 2, "a failed runtime may work now"
    (packages / "new.dist-info").mkdir()
    assert try_runtime_once("onnx")
    assert attempts[5:] == [("onnx", "cpu")]
    file.write_text("[1")
    assert try_runtime_once("onnx")
    assert attempts[6:] == [("onnx", "cpu")]
    assert set(json.loads(file.read_text())) == {"onnx cpu"}


def test_without_a_writable_cache_each_start_repeats_the_trial(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    trials = [
        try_once("onnx", "cpu", file=tmp_path / "file" / "runtimes.json", attempt=lambda *_: TrialResult(text="it"))
        for _ in range(2)
    ]
    assert [trial.text for trial in trials] == ["it", "it"]
