"""Every kind of step, written and verified for every target, and then run for several steps."""

from functools import cache
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from export.step_cases import CASES, IMAGE, images
from matrices import crossed
from torch import Tensor

from subfleet.export.programs import write_inference_model, write_program
from subfleet.export.steps import Step, inference_step
from subfleet.export.targets import TARGETS
from subfleet.export.verification.distances import EAGER_FACTOR
from subfleet.export.verification.verifying import trials_of
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.programs import Program

pytestmark = [pytest.mark.export, pytest.mark.slow]


@cache
def write_case(name: str, target: str) -> tuple[Step, Program]:
    step = CASES[name]()
    return step, write_program(step, target=target, program_id=name)


def run(program: Program, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {value.name: inputs[value.name] for value in program.manifest.inputs}
    results = TARGETS[program.manifest.target].run(bytes(program.body), named)
    return {value.name: result for value, result in zip(program.manifest.outputs, results, strict=True)}


def eager_distance(step: Step) -> float:
    """The largest error of PyTorch's own single precision on the batches that a program may pass on.

    One of them has two samples, which are very few for a norm: errors of 2e-3 were seen.
    """
    distances = []
    for trial in trials_of(step, torch.Generator().manual_seed(0)):
        eager = step.reference(*trial.example)
        distances += [trial.distance(index, result).largest for index, result in enumerate(eager)]
    return max(distances)


@pytest.mark.parametrize(
    ("name", "target"), crossed(CASES, TARGET_NAMES, "batch norm and dropout", "next token", "nested")
)
def test_three_steps_of_a_program_are_those_of_pytorch(target: str, name: str) -> None:
    step, program = write_case(name, target)
    assert (program.manifest.inputs, program.manifest.outputs) == (step.inputs, step.outputs)
    difference = program.manifest.max_abs_diff
    assert difference > 0
    assert difference <= 1e-4 or difference <= EAGER_FACTOR * eager_distance(step)
    inputs: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for seed in range(3):
        tensors = step.example(torch.Generator().manual_seed(seed), apply=seed == 2)
        batch = {value.name: tensor for value, tensor in zip(step.inputs, tensors, strict=True)}
        inputs = batch | {name: tensor for name, tensor in inputs.items() if name in batch}
        exact = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()} | exact
        results = run(program, inputs)
        reference = step.run(*(exact[value.name] for value in step.inputs))
        inputs, exact = {}, {}
        for value, expected in zip(step.outputs, reference, strict=True):
            torch.testing.assert_close(results[value.name].double(), expected, atol=1e-4, rtol=1e-3, msg=value.name)
            if value.name.startswith("new."):
                inputs[value.name.removeprefix("new.")] = results[value.name]
                exact[value.name.removeprefix("new.")] = expected


def test_onnx_runtime_does_not_merge_the_two_runs_of_a_block(tmp_path: Path) -> None:
    """It merges equal nodes with equal inputs; recomputation would then save nothing."""
    counts = {}
    for name in ("batch norm and dropout", "recomputed"):
        _, program = write_case(name, "onnx")
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(bytes(program.body), options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(tmp_path / "optimised.onnx").graph.node
        counts[name] = sum(node.op_type in ("Sigmoid", "QuickGelu") for node in nodes)
    assert counts["recomputed"] >= counts["batch norm and dropout"] + 2


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_inference_normalises_by_running_statistics(target: str) -> None:
    module = images()
    step = inference_step(module, IMAGE, batch_size=TARGETS[target].inference_batch_size)
    tensors = step.example(torch.Generator().manual_seed(0))
    weights = {value.tensor: tensor for value, tensor in zip(step.inputs[1:], tensors[1:], strict=True)}
    body, difference = write_inference_model(step, weights, target=target)
    assert difference <= 1e-4
    module.load_state_dict(weights, strict=False)
    (logits,) = TARGETS[target].run(body, {"input": tensors[0]})
    torch.testing.assert_close(logits, module.eval()(tensors[0]).detach(), atol=1e-5, rtol=1e-5)
