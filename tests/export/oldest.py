"""Run programs on the oldest supported ONNX Runtime, in a separate process."""

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


def run_on_oldest(body: bytes, fed: Mapping[str, npt.NDArray[Any]], folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Run a program once; return its outputs by name."""
    program, inputs, outputs = (folder / part for part in ("program.onnx", "inputs.npz", "outputs.npz"))
    program.write_bytes(body)
    np.savez(inputs, **fed)  # type: ignore[arg-type]  # no input is called allow_pickle, its only keyword
    version = subprocess.check_output(
        [sys.executable, str(SCRIPT), str(program), str(inputs), str(outputs)],
        env={**os.environ, "PYTHONPATH": str(OLDEST)},
        text=True,
    )
    assert version == "1.23.2"
    with np.load(outputs) as arrays:
        return dict(arrays)
