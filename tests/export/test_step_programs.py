"""Every kind of step written for every target, where it is verified, and then run for several steps."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from export.export_cases import largest, smallest
from torch import Tensor, nn

from subfleet.elastic.families import build_module, network_of
from subfleet.elastic.maps import nested_maps
from subfleet.elastic.network import ModelConfig
from subfleet.export.programs import write_inference_model, write_training_program
from subfleet.export.steps import SampleSpec, Step, Student, inference_step, training_step
from subfleet.export.targets import TARGETS
from subfleet.export.verification import TOLERANCE
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.programs import Program
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]
PLAIN = OptimiserSettings(momentum=0.0)


TINY = ModelConfig(family="mlp", input_shape=(4,), class_count=3, widths=(8,), depths=(1,), group_size=4)


class Block(nn.Module):
    """Convolution, BatchNorm and dropout with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.drop(nn.functional.silu(self.norm(self.layer(x))))
        return x + added


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), Block(), Block(), nn.Flatten(), nn.Linear(36, 3))


def frozen_images() -> nn.Module:
    module = images()
    for layer in module.modules():
        layer.train(not isinstance(layer, nn.BatchNorm2d))
    return module


class Exits(nn.Module):
    """Two classifiers at growing depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.exits = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for layer, head in zip(self.layers, self.exits, strict=True):
            x = torch.tanh(layer(x))
            found.append(head(x))
        return tuple(found)


def nested() -> Step:
    network = network_of(TINY)
    outer, inner = largest(TINY), smallest(TINY)
    student = Student(module=build_module(network, inner), maps=nested_maps(network, outer, inner))
    objective = ObjectiveSettings(distillation="self", temperature=2.0)
    sample = SampleSpec(shape=TINY.input_shape)
    return training_step(build_module(network, outer), sample, batch_size=6, objective=objective, optimiser=PLAIN,
                         student=student)  # fmt: skip


def step_of(
    build: Callable[[], nn.Module], sample: SampleSpec, optimiser: OptimiserSettings = PLAIN, **rest: Any
) -> Step:
    objective = {name: rest.pop(name) for name in list(rest) if name in ObjectiveSettings.__dataclass_fields__}
    return training_step(
        build(), sample, batch_size=6, objective=ObjectiveSettings(**objective), optimiser=optimiser, **rest
    )


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9))


def vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU()), nn.Linear(6, 3))


IMAGE, VECTOR, WORDS = SampleSpec(shape=(2, 5, 5)), SampleSpec(shape=(4,)), SampleSpec(shape=(5,), dtype="I64", limit=9)
CASES: dict[str, Callable[[], Step]] = {
    "batch norm and dropout": partial(step_of, images, IMAGE, label_smoothing=0.1),
    "recomputed": partial(step_of, images, IMAGE, recompute=True),
    "next token": partial(step_of, words, WORDS, OptimiserSettings(name="adamw"), name="next_token"),
    "binary": partial(step_of, vectors, VECTOR, name="binary_cross_entropy"),
    "squared error": partial(step_of, vectors, VECTOR, OptimiserSettings(nesterov=True), name="mean_squared_error"),
    "proximal, class mask, clipped": partial(
        step_of,
        vectors,
        VECTOR,
        OptimiserSettings(dampening=0.1, max_gradient_norm=0.1),
        proximal=True,
        class_mask=True,
    ),
    "accumulated": partial(
        step_of, words, WORDS, OptimiserSettings(name="adam", max_gradient_norm=0.1), name="next_token", accumulate=True
    ),
    "accumulated with dampening": partial(
        step_of, frozen_images, IMAGE, OptimiserSettings(dampening=0.5), accumulate=True, proximal=True
    ),
    "mutual": partial(step_of, Exits, VECTOR, distillation="mutual"),
    "nested": nested,
}


@cache
def written(name: str, target: str) -> tuple[Step, Program]:
    step = CASES[name]()
    return step, write_training_program(step, target=target, program_id=name)


def run(program: Program, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {value.name: inputs[value.name] for value in program.manifest.inputs}
    results = TARGETS[program.manifest.target].run(bytes(program.body), named)
    return {value.name: result for value, result in zip(program.manifest.outputs, results, strict=True)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_three_steps_of_a_program_are_those_of_pytorch(target: str, name: str) -> None:
    step, program = written(name, target)
    assert (program.manifest.inputs, program.manifest.outputs) == (step.inputs, step.outputs)
    assert 0 < program.manifest.max_abs_diff <= TOLERANCE
    inputs: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for seed in range(3):
        tensors = step.example(torch.Generator().manual_seed(seed), apply=seed == 2)
        batch = {value.name: tensor for value, tensor in zip(step.inputs, tensors, strict=True)}
        inputs = batch | {name: tensor for name, tensor in inputs.items() if name in batch}
        exact = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()} | exact
        results = run(program, inputs)
        right = step.run(*(exact[value.name] for value in step.inputs))
        inputs, exact = {}, {}
        for value, expected in zip(step.outputs, right, strict=True):
            torch.testing.assert_close(results[value.name].double(), expected, atol=1e-4, rtol=1e-3, msg=value.name)
            if value.name.startswith("new."):
                inputs[value.name.removeprefix("new.")] = results[value.name]
                exact[value.name.removeprefix("new.")] = expected


def test_onnx_runtime_does_not_merge_the_two_runs_of_a_block(tmp_path: Path) -> None:
    """It merges nodes that do the same to the same inputs; then nothing would be gained."""
    counts = {}
    for name in ("batch norm and dropout", "recomputed"):
        _, program = written(name, "onnx")
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
    assert difference <= TOLERANCE
    module.load_state_dict(weights, strict=False)
    (logits,) = TARGETS[target].run(body, {"input": tensors[0]})
    torch.testing.assert_close(logits, module.eval()(tensors[0]).detach(), atol=1e-5, rtol=1e-5)
