"""Loads each model in a fresh process, as its user would, and measures how good it is; of equal files, one."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from subfleet.protocol.errors import RunError
from subfleet.protocol.exit_codes import ExitCode

__all__ = ["Found", "predictions"]

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How good a model is.

    Attributes:
        metric: that it is judged by, a name in `subfleet.protocol.task_kinds.METRICS`.
    """

    metric: str
    value: float


def predictions(models: Sequence[Path], data: Path, *, at_once: int = 2) -> tuple[Found, ...]:
    """How good each model file is on a data set, each by `subfleet-edge predict` in a process of its own.

    Args:
        models: .onnx and .pte files; of several with the same bytes one is tried.
        data: the samples and labels, .npz.
        at_once: processes that run side by side.

    Raises:
        RunError: a process failed; the text carries its own sentence.
        KeyboardInterrupt: Ctrl-C, which reaches every process of a terminal, has ended one.
    """
    contents = [(hashlib.sha256(model.read_bytes()).digest(), model.suffix) for model in models]
    distinct: dict[tuple[bytes, str], Path] = {}
    for content, model in zip(contents, models, strict=True):
        distinct.setdefault(content, model)
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        found = dict(zip(distinct, pool.map(lambda model: _found(model, data), distinct.values()), strict=True))
    return tuple(found[content] for content in contents)


def _found(model: Path, data: Path) -> Found:
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
    return Found(metric=said["headline"], value=float(said["metrics"][said["headline"]]))


def _reason(code: int, stderr: str) -> str:
    """The last thing that a process said, or how it ended without a word."""
    said = stderr.strip().splitlines()
    if said:
        return said[-1]
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code} and said nothing"
