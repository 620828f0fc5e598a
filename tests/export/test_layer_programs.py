"""Every layer in a training step, on every target, compared with PyTorch in double precision."""

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from export import layer_cases
from export.browser import BrowserJob, missing, run_in_browser
from export.layer_cases import GROUPS, group_of
from export.oldest import needs_oldest, run_on_oldest
from safetensors.torch import load_file, save
from shared_programs import folder_of_programs
from torch import Tensor

from subfleet.export.cache import lock_result
from subfleet.export.jobs import write_atomically
from subfleet.export.programs import write_program
from subfleet.export.steps import Step, training_step
from subfleet.export.targets import find_target
from subfleet.protocol.programs import Program
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]


@cache
def write_group(group: str, target: str) -> tuple[Step, Program]:
    """A group's step and program. Writing compares one step with PyTorch; an error names the branch."""
    module, sample = group_of(group)
    step = training_step(
        module, sample, batch_size=3, objective=ObjectiveSettings(), optimiser=OptimiserSettings(momentum=0.0)
    )
    return step, write_program(step, target=target, program_id=group)


@cache
def example_of(group: str) -> tuple[bytes, dict[str, Tensor], dict[str, Tensor]]:
    """A group's ONNX program, inputs, and the outputs of the newest runtime.

    One process writes them for all, once for each version of the exporter and of the layers.
    """
    path = folder_of_programs().path / f"{group} {_LAYERS}.layers"
    with lock_result(path):
        if not path.exists():
            _write_example(group, path)
    arrays = load_file(path)
    body = arrays.pop("body").numpy().tobytes()
    inputs, expected = ({name[1:]: tensor for name, tensor in arrays.items() if name[0] == side} for side in "<>")
    return body, inputs, expected


_LAYERS = hashlib.sha256(Path(layer_cases.__file__).read_bytes()).hexdigest()[:16]


def _write_example(group: str, path: Path) -> None:
    step, program = write_group(group, "onnx")
    body = bytes(program.body)
    example = step.example(torch.Generator().manual_seed(3))
    inputs = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
    expected = {
        value.name: tensor for value, tensor in zip(step.outputs, find_target("onnx").run(body, inputs), strict=True)
    }
    arrays = {f"<{name}": tensor for name, tensor in inputs.items()} | {
        f">{name}": tensor for name, tensor in expected.items()
    }
    arrays["body"] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    write_atomically(path, save({name: tensor.contiguous() for name, tensor in arrays.items()}))


@pytest.mark.parametrize("target", ["onnx", "executorch"])
@pytest.mark.parametrize("group", GROUPS)
def test_layers_train(group: str, target: str) -> None:
    if target == "onnx":
        example_of(group)  # write it here for the other tests
    step, program = write_group(group, target)
    assert program.manifest.max_abs_diff <= 1e-5
    assert {value.tensor for value in step.inputs if value.role == "parameter"} == {
        name for name, _ in group_of(group)[0].named_parameters()
    }


@needs_oldest
def test_layers_train_on_the_oldest_onnxruntime(tmp_path: Path) -> None:
    cases = {group: example_of(group) for group in GROUPS}
    programs = {
        group: (body, {name: tensor.numpy() for name, tensor in inputs.items()})
        for group, (body, inputs, _) in cases.items()
    }
    actual = run_on_oldest(programs, tmp_path)
    for group, (_, _, expected) in cases.items():
        for name, tensor in expected.items():
            np.testing.assert_allclose(
                actual[group][name], tensor.numpy(), atol=1e-5, rtol=1e-4, err_msg=f"{group}: {name}"
            )


@pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there")
def test_layers_train_in_a_browser(tmp_path: Path) -> None:
    cases = {group: example_of(group) for group in GROUPS}
    jobs = {
        group.replace(" ", "-"): BrowserJob(body=body, inputs={name: tensor.numpy() for name, tensor in inputs.items()})
        for group, (body, inputs, _) in cases.items()
    }
    answers = run_in_browser(jobs, tmp_path)
    for group, (_, _, expected) in cases.items():
        answer = answers[group.replace(" ", "-")]
        assert "error" not in answer, f"{group}: {answer}"
        for name, tensor in expected.items():
            actual = np.reshape(answer["outputs"][name], tuple(tensor.shape))
            np.testing.assert_allclose(actual, tensor.numpy(), atol=1e-5, rtol=1e-4, err_msg=f"{group}: {name}")
