"""Modules as users write them train as in PyTorch, or errors name the part that no program can carry."""

import itertools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from export import user_modules
from export.user_modules import CLASSES, USER_MODULES
from torch import Tensor, nn

from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.export.targets import find_target
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

BATCH, STEPS, RATE, MOMENTUM = 4, 10, 0.05, 0.9
TRAINED = sorted(name for name, case in USER_MODULES.items() if not case.refused)
REFUSED = sorted(name for name, case in USER_MODULES.items() if case.refused)


def build_module(name: str) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    module = USER_MODULES[name].make()
    with torch.no_grad():
        for part in module.parameters():
            part.copy_(torch.randn(part.shape, generator=generator) / part.shape[-1] ** 0.5)
    return module


def step_of(name: str) -> Step:
    return training_step(
        build_module(name),
        SampleSpec(shape=USER_MODULES[name].shape),
        batch_size=BATCH,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(momentum=MOMENTUM),
    )


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, *USER_MODULES[name].shape)
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


ON_BOTH = ("a hook that scales", "counters in buffers", "a backward of its own", "a pool by powers")
"""How a module is carried depends only on the step, from which both targets are written."""
CASES = [
    pytest.param(name, target, marks=() if target == "onnx" or name in ON_BOTH else pytest.mark.long)
    for name, target in itertools.product(TRAINED, ("onnx", "executorch"))
]


def train_eagerly(name: str, precision: torch.dtype) -> Mapping[str, Tensor]:
    """Train the module in plain PyTorch."""
    module = build_module(name).to(precision)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    for inputs, labels in batches(name):
        optimiser.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(module(inputs.to(precision)), labels))
        optimiser.step()
    return {key: parameter.detach() for key, parameter in module.named_parameters()}


def train_by_program(name: str, target: str) -> Mapping[str, Tensor]:
    step, module = step_of(name), build_module(name)
    body = write_program(step, target=target, program_id="0" * 64).body
    run = find_target(target).run
    state = {f"parameter.{key}": tensor.detach() for key, tensor in module.named_parameters()}
    state |= {f"buffer.{key}": tensor for key, tensor in module.named_buffers() if tensor.is_floating_point()}
    arguments = {"learning_rate": torch.tensor(RATE), "sample_mask": torch.ones(BATCH), **state}
    arguments |= {value.name: torch.zeros(value.shape) for value in step.inputs if value.role == "optimiser_state"}
    for inputs, labels in batches(name):
        arguments |= {"input": inputs, "label": labels}
        results = run(bytes(body), {value.name: arguments[value.name] for value in step.inputs})
        named = {value.name: tensor for value, tensor in zip(step.outputs, results, strict=True)}
        arguments |= {key.removeprefix("new."): tensor for key, tensor in named.items() if key.startswith("new.")}
    return {key: arguments[f"parameter.{key}"] for key, _ in module.named_parameters()}


def random_states() -> tuple[object, object]:
    """The states of Python's and NumPy's random generators."""
    state = np.random.get_state(legacy=False)
    return random.getstate(), repr(state)


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    return float(torch.cat([(first[name].double() - second[name].double()).flatten() for name in second]).norm())


def test_shared_objects_are_not_changed() -> None:
    before = dict(dict.items(user_modules.activation_registry))
    step_of("a registry that makes what it is asked for")
    assert dict(dict.items(user_modules.activation_registry)) == before


def test_there_are_forty_modules_and_twenty_five_train() -> None:
    assert len(USER_MODULES) >= 40
    assert len(TRAINED) >= 25


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("name", "target"), CASES)
def test_after_ten_steps_it_is_as_near_as_eager(name: str, target: str) -> None:
    """The distance from double precision is at most four times that of eager training."""
    exact, eager = train_eagerly(name, torch.float64), train_eagerly(name, torch.float32)
    assert distance(train_by_program(name, target), exact) <= 4 * distance(eager, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_state_that_no_program_carries_is_refused_by_name(name: str) -> None:
    before = random_states()
    with pytest.raises(ExportError, match=USER_MODULES[name].refused):
        write_program(step_of(name), target="onnx", program_id="0" * 64)
    assert random_states() == before, "an export must not change the global random states"


class Mixing(nn.Module):
    """A hand-written norm over the batch, in a named layer."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt()


def accumulating_step(module: nn.Module, size: int, **settings: Any) -> Step:
    return training_step(
        module,
        SampleSpec(shape=(8,)),
        batch_size=size,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(),
        accumulate=True,
        **settings,
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layer", [Mixing(), nn.Softmax(dim=0)], ids=["norm", "softmax"])
def test_micro_batches_of_layers_that_mix_samples_are_refused_by_name(size: int, layer: nn.Module) -> None:
    """Also with one sample, where no difference shows: program and module are then wrong alike."""
    module = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, CLASSES))
    with pytest.raises(ExportError, match=r"layer '1' mixes the samples of a batch.*set micro_batch_size = 0"):
        accumulating_step(module, size)


@pytest.mark.parametrize("layer", [nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3)], ids=["gelu", "norm", "dropout"])
def test_micro_batches_of_other_layers_are_accepted(layer: nn.Module) -> None:
    accumulating_step(nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, CLASSES)), 1)


def test_a_hook_would_see_parts_of_a_batch() -> None:
    module = USER_MODULES["a hook that normalises"].make()
    with pytest.raises(ExportError, match=r"parameter '0\.weight' has a hook.*set micro_batch_size = 0"):
        accumulating_step(module, 2)
    accumulating_step(module, 2, one_part=True)
