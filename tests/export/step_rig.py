"""Run steps in PyTorch with values by name, to compare them with plain PyTorch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

PLAIN_SGD = OptimiserSettings(momentum=0.0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in double precision."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def example(step: Step, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs by name, in double precision."""
    tensors = step.example(torch.Generator().manual_seed(seed))
    doubled = (tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)
    return {value.name: tensor for value, tensor in zip(step.inputs, doubled, strict=True)}


def run(step: Step, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The step's results by name."""
    results = step.run(*(inputs[value.name] for value in step.inputs))
    assert [tuple(result.shape) for result in results] == [value.shape for value in step.outputs]
    return {value.name: result for value, result in zip(step.outputs, results, strict=True)}


def next_inputs(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results that the next step takes as inputs."""
    return {name.removeprefix("new."): result for name, result in results.items() if name.startswith("new.")}


def load_values(module: nn.Module, inputs: Mapping[str, Tensor]) -> nn.Module:
    """The module in double precision, with the parameters and buffers from a step's inputs."""
    module = module.double()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if f"{kind}.{name}" in inputs:
            tensor.data.copy_(inputs[f"{kind}.{name}"])
    return module


def step_of_module(module: nn.Module, shape: tuple[int, ...], *, batch_size: int = 4, **options: Any) -> Step:
    """A training step with the default objective and plain SGD, unless `options` say otherwise."""
    settings: dict[str, Any] = {
        "objective": ObjectiveSettings(),
        "optimiser": PLAIN_SGD,
        "sample": SampleSpec(shape=shape),
    } | options
    sample = settings.pop("sample")
    return training_step(module, sample, batch_size=batch_size, **settings)


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    """Assert that names are the same, and numbers are the same up to rounding."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, atol=tolerance, rtol=tolerance, msg=partial("{}: {}".format, name)
        )
