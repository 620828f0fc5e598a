"""Programs run on the oldest ONNX Runtime that a device may have, and give what the newest gives."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from export.export_cases import CASES, program_of, step_of, train_request

from subfleet.export.targets import target_named

OLDEST = Path(__file__).parents[2] / "build" / "onnxruntime-1.23.2"
SCRIPT = Path(__file__).with_name("old_runtime.py")

pytestmark = [
    pytest.mark.export,
    pytest.mark.slow,
    pytest.mark.skipif(not OLDEST.is_dir(), reason="onnxruntime 1.23.2 is not in build/: run `make test` once"),
]


@pytest.mark.parametrize("name", ["resnet largest", "ungrouped resnet scattered", "mlp scattered"])
def test_the_oldest_runtime_gives_the_same_step(name: str, tmp_path: Path) -> None:
    model, spec = CASES[name]
    request = train_request("onnx", model, spec=spec)
    step, body = step_of(request), bytes(program_of(request).body)
    fed = {
        value.name: tensor
        for value, tensor in zip(step.inputs, step.example(torch.Generator().manual_seed(6)), strict=True)
    }
    expected = target_named("onnx").run(body, fed)
    program, inputs, outputs = (tmp_path / part for part in ("program.onnx", "inputs.npz", "outputs.npz"))
    program.write_bytes(body)
    arrays = {key: tensor.numpy() for key, tensor in fed.items()}
    np.savez(inputs, **arrays)  # type: ignore[arg-type]  # its only keyword of its own is no name of ours
    version = subprocess.check_output(
        [sys.executable, str(SCRIPT), str(program), str(inputs), str(outputs)],
        env={**os.environ, "PYTHONPATH": str(OLDEST)},
        text=True,
    )
    assert version == "1.23.2"
    with np.load(outputs) as got:
        for value, tensor in zip(step.outputs, expected, strict=True):
            np.testing.assert_allclose(got[value.name], tensor.numpy(), atol=1e-5, rtol=1e-5)
