"""Run programs on the oldest supported ONNX Runtime, in one separate process."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

OLDEST = Path(__file__).parents[2] / "build" / "onnxruntime-1.23.2"
SCRIPT = Path(__file__).with_name("old_runtime.py")

needs_oldest = pytest.mark.skipif(
    not (OLDEST / ".made").exists(), reason="onnxruntime 1.23.2 is not in build/: run `make test` once"
)


Arrays = Mapping[str, npt.NDArray[Any]]


def run_on_oldest(programs: Mapping[str, tuple[bytes, Arrays]], folder: Path) -> dict[str, Arrays]:
    """Run programs with their inputs once each, all in one process; return the outputs of each by name."""
    for name, (body, inputs) in programs.items():
        (folder / f"{name}.onnx").write_bytes(body)
        np.savez(folder / f"{name}.inputs.npz", **inputs)  # type: ignore[arg-type] # no input is called allow_pickle
    version = subprocess.check_output(
        [sys.executable, str(SCRIPT), str(folder), *programs],
        env={**os.environ, "PYTHONPATH": str(OLDEST)},
        text=True,
    )
    assert version == "1.23.2"
    outputs: dict[str, Arrays] = {}
    for name in programs:
        with np.load(folder / f"{name}.outputs.npz") as arrays:
            outputs[name] = dict(arrays)
    return outputs
