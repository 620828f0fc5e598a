"""Every layer in a training step, on every target, against PyTorch in double precision."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from export.browser import BrowserJob, missing, run_in_browser
from export.layer_cases import GROUPS, group_of
from export.oldest import needs_oldest, run_on_oldest
from torch import Tensor

from subfleet.export.programs import write_program
from subfleet.export.steps import Step, training_step
from subfleet.export.targets import find_target
from subfleet.protocol.programs import Program
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]


@cache
def written(group: str, target: str) -> tuple[Step, Program]:
    """A group's step and program. Writing compares one step with PyTorch; a defect's message names its branch."""
    module, sample = group_of(group)
    step = training_step(
        module, sample, batch_size=3, objective=ObjectiveSettings(), optimiser=OptimiserSettings(momentum=0.0)
    )
    return step, write_program(step, target=target, program_id=group)


def example_of(group: str) -> tuple[bytes, dict[str, Tensor], dict[str, Tensor]]:
    """A group's ONNX program, something to feed it, and what the newest runtime makes of that."""
    step, program = written(group, "onnx")
    example = step.example(torch.Generator().manual_seed(3))
    fed = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
    results = find_target("onnx").run(bytes(program.body), fed)
    return bytes(program.body), fed, {value.name: got for value, got in zip(step.outputs, results, strict=True)}


@pytest.mark.parametrize("target", ["onnx", "executorch"])
@pytest.mark.parametrize("group", GROUPS)
def test_layers_train(group: str, target: str) -> None:
    step, program = written(group, target)
    assert program.manifest.max_abs_diff <= 1e-5
    assert {value.tensor for value in step.inputs if value.role == "parameter"} == {
        name for name, _ in group_of(group)[0].named_parameters()
    }


@needs_oldest
@pytest.mark.parametrize("group", GROUPS)
def test_layers_train_on_the_oldest_onnxruntime(group: str, tmp_path: Path) -> None:
    body, fed, expected = example_of(group)
    got = run_on_oldest(body, {name: tensor.numpy() for name, tensor in fed.items()}, tmp_path)
    for name, tensor in expected.items():
        np.testing.assert_allclose(got[name], tensor.numpy(), atol=1e-5, rtol=1e-4, err_msg=name)


@pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there")
def test_layers_train_in_a_browser(tmp_path: Path) -> None:
    cases = {group: example_of(group) for group in GROUPS}
    jobs = {
        group.replace(" ", "-"): BrowserJob(body=body, inputs={name: tensor.numpy() for name, tensor in fed.items()})
        for group, (body, fed, _) in cases.items()
    }
    answers = run_in_browser(jobs, tmp_path)
    for group, (_, _, expected) in cases.items():
        answer = answers[group.replace(" ", "-")]
        assert "error" not in answer, f"{group}: {answer}"
        for name, tensor in expected.items():
            got = np.reshape(answer["outputs"][name], tuple(tensor.shape))
            np.testing.assert_allclose(got, tensor.numpy(), atol=1e-5, rtol=1e-4, err_msg=f"{group}: {name}")
