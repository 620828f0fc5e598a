"""Every layer in a training step, on every target, against PyTorch in double precision."""

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
def written(group: str, target: str) -> tuple[Step, Program]:
    """A group's step and program. Writing compares one step with PyTorch; a defect's message names its branch."""
    module, sample = group_of(group)
    step = training_step(
        module, sample, batch_size=3, objective=ObjectiveSettings(), optimiser=OptimiserSettings(momentum=0.0)
    )
    return step, write_program(step, target=target, program_id=group)


@cache
def example_of(group: str) -> tuple[bytes, dict[str, Tensor], dict[str, Tensor]]:
    """A group's ONNX program, something to feed it, and what the newest runtime makes of that.

    They are written by one process for all, once for one state of the exporter and of the layers.
    """
    path = folder_of_programs().path / f"{group} {_LAYERS}.layers"
    with lock_result(path):
        if not path.exists():
            _write_example(group, path)
    arrays = load_file(path)
    body = arrays.pop("body").numpy().tobytes()
    fed, expected = ({name[1:]: tensor for name, tensor in arrays.items() if name[0] == side} for side in "<>")
    return body, fed, expected


_LAYERS = hashlib.sha256(Path(layer_cases.__file__).read_bytes()).hexdigest()[:16]


def _write_example(group: str, path: Path) -> None:
    step, program = written(group, "onnx")
    body = bytes(program.body)
    example = step.example(torch.Generator().manual_seed(3))
    fed = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
    expected = {value.name: got for value, got in zip(step.outputs, find_target("onnx").run(body, fed), strict=True)}
    arrays = {f"<{name}": tensor for name, tensor in fed.items()} | {f">{name}": got for name, got in expected.items()}
    arrays["body"] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    write_atomically(path, save({name: tensor.contiguous() for name, tensor in arrays.items()}))


@pytest.mark.parametrize("target", ["onnx", "executorch"])
@pytest.mark.parametrize("group", GROUPS)
def test_layers_train(group: str, target: str) -> None:
    if target == "onnx":
        example_of(group)  # for the others, by what writes the program here
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
