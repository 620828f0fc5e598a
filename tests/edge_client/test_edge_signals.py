"""Ctrl-C, other signals and the end of standard input stop the command with one sentence at any moment."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from subfleet.protocol.exit_codes import ExitCode


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((6, 1, 2, 2), np.float32), y=np.arange(6) % 3)
    return str(path)


INTERRUPTING = """
import os, signal, sys
class Interrupting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(Interrupting)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
            except KeyboardInterrupt:
                if sys.argv[2] == "as it is":
                    raise
                raise ImportError("Here are some reasons:\\n  * \\nOriginal error was: ") from None
sys.meta_path.insert(0, Interrupting)
from subfleet.edge_client.cli import main
sys.exit(main(["predict", sys.argv[3], "--data", "x.npz"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("subfleet.edge_client.commands", "as it is"),
        ("subfleet.protocol.exit_codes", "as it is"),
        ("importlib.metadata", "as it is"),
        ("numpy", "as it is"),
        ("numpy", "as an error"),  # as compiled packages do
        ("onnxruntime", "as an error"),
    ],
)
def test_an_interruption_during_any_import_is_one_sentence(tmp_path: Path, name: str, form: str) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(b"x")
    command = [sys.executable, "-c", INTERRUPTING, name, form, str(model)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stdout) == (ExitCode.INTERRUPTED, "")
    assert process.stderr == "subfleet-edge: interrupted; run the same command again to continue\n"


AT_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_joined_device_cleanly(tmp_path: Path, data: str, number: signal.Signals) -> None:
    broker = pytest.importorskip("subfleet.link.broker")
    with broker.EmbeddedBroker() as running_broker:
        command = [
            sys.executable,
            "-m",
            "subfleet.edge_client.cli",
            "join",
            running_broker.url,
            "--data",
            data,
            "--id",
            "pi",
        ]
        command += ["--state", str(tmp_path / "state"), "--replay", "raspberry_pi_4"]
        # The test process may ignore SIGHUP, as under nohup; the device would inherit that.
        command = [sys.executable, "-c", AT_A_TERMINAL, *command]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as device:
            assert device.stderr is not None
            for line in device.stderr:
                if "connected as pi" in line:
                    break
            device.send_signal(number)
            try:
                _, rest = device.communicate(timeout=30)
            finally:
                device.kill()
            assert device.returncode == 0
    assert "run the same command again to continue" in rest
    assert "Traceback" not in rest


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("arrives", [True, False])
def test_a_device_waits_for_a_broker_until_it_starts_or_ctrl_c(tmp_path: Path, data: str, arrives: bool) -> None:
    broker = pytest.importorskip("subfleet.link.broker").EmbeddedBroker()
    with broker:
        pass  # only to get an address
    command = [sys.executable, "-m", "subfleet.edge_client.cli", "join", broker.url, "--data", data, "--id", "pi"]
    command += ["--state", str(tmp_path / "state"), "--wait"]
    with ExitStack() as stack:
        device = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        stack.callback(device.kill)
        assert device.stderr is not None
        waiting = []
        for line in device.stderr:
            if "waiting for it until Ctrl-C" in line:
                waiting.append(line)
                break
        if arrives:
            stack.enter_context(broker)
            for line in device.stderr:
                waiting += [line] if "waiting for it" in line else []
                if "connected as pi" in line:
                    break
        device.send_signal(signal.SIGINT)
        _, rest = device.communicate(timeout=30)
    assert device.returncode == 0, rest
    assert len(waiting) == 1
    assert "interrupted; run the same command again to continue" in rest


@pytest.mark.slow
@pytest.mark.broker
def test_a_child_stops_cleanly_when_its_parent_is_gone(tmp_path: Path, data: str) -> None:
    broker = pytest.importorskip("subfleet.link.broker")
    with broker.EmbeddedBroker() as running_broker:
        command = [
            sys.executable,
            "-m",
            "subfleet.edge_client.cli",
            "join",
            running_broker.url,
            "--data",
            data,
            "--id",
            "pi",
        ]
        command += ["--state", str(tmp_path / "state"), "--replay", "raspberry_pi_4", "--leave-with-stdin"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as device:
            assert device.stdin is not None
            assert device.stderr is not None
            for line in device.stderr:
                if "connected as pi" in line:
                    break
            device.stdin.close()  # as the system does when the parent is killed
            try:
                assert device.wait(timeout=30) == 0
            finally:
                device.kill()
