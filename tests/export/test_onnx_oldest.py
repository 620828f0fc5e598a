"""Programs give the same results on the oldest supported ONNX Runtime as on the newest."""

from pathlib import Path

import numpy as np
import pytest
import torch
from export.export_cases import CASES, step_of, train_request
from export.oldest import needs_oldest, run_on_oldest
from shared_programs import program_of

from subfleet.export.targets import find_target

pytestmark = [pytest.mark.export, pytest.mark.slow, needs_oldest]


@pytest.mark.parametrize("name", ["resnet largest", "ungrouped resnet scattered", "mlp scattered"])
def test_the_oldest_runtime_gives_the_same_step(name: str, tmp_path: Path) -> None:
    model, architecture = CASES[name]
    request = train_request("onnx", model, architecture=architecture)
    step, body = step_of(request), bytes(program_of(request).body)
    example = step.example(torch.Generator().manual_seed(6))
    inputs = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
    expected = find_target("onnx").run(body, inputs)
    actual = run_on_oldest(body, {key: tensor.numpy() for key, tensor in inputs.items()}, tmp_path)
    for value, tensor in zip(step.outputs, expected, strict=True):
        np.testing.assert_allclose(actual[value.name], tensor.numpy(), atol=1e-5, rtol=1e-5)
