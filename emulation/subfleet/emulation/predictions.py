"""Loads each model in a new process, as its user would, and measures its headline metric."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from subfleet.protocol.errors import RunError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.reporting.results import OwnMetric

TIMEOUT_S = 120.0


def evaluate_models(models: Sequence[Path], data: Path, *, at_once: int = 2) -> tuple[OwnMetric, ...]:
    """The headline metric of each model on a data set, measured by `subfleet-edge predict` in a process for each model.

    Args:
        models: .onnx and .pte files.
        data: samples and labels, an .npz file.
        at_once: number of processes that run in parallel.

    Raises:
        RunError: a process failed; the message contains its error.
        KeyboardInterrupt: Ctrl-C, which reaches every process of a terminal, ended one.
    """
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return tuple(pool.map(lambda model: _measure(model, data), models))


def _measure(model: Path, data: Path) -> OwnMetric:
    command = [sys.executable, "-m", "subfleet.edge_client.cli", "predict", str(model), "--data", str(data), "--json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"predicting with {model} took more than {TIMEOUT_S:g} s; check the file") from error
    if done.returncode in (ExitCode.INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise RunError(f"predicting with {model} failed: {_explain_exit(done.returncode, done.stderr)}")
    result = json.loads(done.stdout)
    return OwnMetric(metric=result["headline"], value=float(result["metrics"][result["headline"]]))


def _explain_exit(code: int, stderr: str) -> str:
    """The last line that a process wrote to standard error, or else its exit code."""
    if lines := stderr.strip().splitlines():
        return lines[-1]
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code} and no message"
