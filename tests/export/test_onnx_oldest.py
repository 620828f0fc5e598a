"""Programs give the same results on the oldest supported ONNX Runtime as on the newest."""

from pathlib import Path

import numpy as np
import pytest
import torch
from export.export_cases import CASES, step_of, train_request
from export.oldest import needs_oldest, run_on_oldest
from shared_programs import program_of
from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.targets import find_target

pytestmark = [pytest.mark.export, pytest.mark.slow, needs_oldest]


NAMES = ("resnet largest", "ungrouped resnet scattered", "mlp scattered")


def test_the_oldest_runtime_gives_the_same_steps(tmp_path: Path) -> None:
    steps: dict[str, Step] = {}
    programs: dict[str, bytes] = {}
    examples: dict[str, dict[str, Tensor]] = {}
    for name in NAMES:
        model, architecture = CASES[name]()
        request = train_request("onnx", model, architecture=architecture)
        step = steps[name] = step_of(request)
        example = step.example(torch.Generator().manual_seed(6))
        examples[name] = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
        programs[name] = bytes(program_of(request).body)
    arrays = {name: {key: tensor.numpy() for key, tensor in example.items()} for name, example in examples.items()}
    actual = run_on_oldest({name: (programs[name], arrays[name]) for name in NAMES}, tmp_path)
    for name, step in steps.items():
        expected = find_target("onnx").run(programs[name], examples[name])
        for value, tensor in zip(step.outputs, expected, strict=True):
            np.testing.assert_allclose(
                actual[name][value.name], tensor.numpy(), atol=1e-5, rtol=1e-5, err_msg=f"{name}: {value.name}"
            )
