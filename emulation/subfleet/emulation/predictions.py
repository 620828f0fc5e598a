"""Loads each model in a fresh process, as its user would, and measures how good it is."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from subfleet.protocol.errors import RunError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.reporting.personalised_models import OwnMetric

TIMEOUT_S = 120.0


def evaluate_models(models: Sequence[Path], data: Path, *, at_once: int = 2) -> tuple[OwnMetric, ...]:
    """How good each model file is on a data set, each by `subfleet-edge predict` in a process of its own.

    Args:
        models: .onnx and .pte files.
        data: the samples and labels, .npz.
        at_once: processes that run side by side.

    Raises:
        RunError: a process failed; the text carries its own sentence.
        KeyboardInterrupt: Ctrl-C, which reaches every process of a terminal, has ended one.
    """
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return tuple(pool.map(lambda model: _metric(model, data), models))


def _metric(model: Path, data: Path) -> OwnMetric:
    command = [sys.executable, "-m", "subfleet.edge_client.cli", "predict", str(model), "--data", str(data), "--json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"predicting with {model} took more than {TIMEOUT_S:g} s; look at the file") from error
    if done.returncode in (ExitCode.INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise RunError(f"predicting with {model} failed: {_reason(done.returncode, done.stderr)}")
    said = json.loads(done.stdout)
    return OwnMetric(metric=said["headline"], value=float(said["metrics"][said["headline"]]))


def _reason(code: int, stderr: str) -> str:
    """The last thing that a process said, or how it ended without a word."""
    said = stderr.strip().splitlines()
    if said:
        return said[-1]
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code} and said nothing"
