"""Modules as users write them train as they do in PyTorch, or are refused by the name of what no program carries."""

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
TRAINED = sorted(name for name, one in USER_MODULES.items() if not one.refused)
REFUSED = sorted(name for name, one in USER_MODULES.items() if one.refused)


def made(name: str) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    module = USER_MODULES[name].make()
    with torch.no_grad():
        for part in module.parameters():
            part.copy_(torch.randn(part.shape, generator=generator) / part.shape[-1] ** 0.5)
    return module


def step_of(name: str) -> Step:
    return training_step(
        made(name),
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
"""What a module is carried like follows from the step, which both targets are written from."""
CASES = [
    pytest.param(name, target, marks=() if target == "onnx" or name in ON_BOTH else pytest.mark.long)
    for name, target in itertools.product(TRAINED, ("onnx", "executorch"))
]


def eagerly(name: str, precision: torch.dtype) -> Mapping[str, Tensor]:
    """As its author would train it."""
    module = made(name).to(precision)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    for inputs, labels in batches(name):
        optimiser.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(module(inputs.to(precision)), labels))
        optimiser.step()
    return {key: one.detach() for key, one in module.named_parameters()}


def by_program(name: str, target: str) -> Mapping[str, Tensor]:
    step, module = step_of(name), made(name)
    body = write_program(step, target=target, program_id="0" * 64).body
    run = find_target(target).run
    state = {f"parameter.{key}": one.detach() for key, one in module.named_parameters()}
    state |= {f"buffer.{key}": one for key, one in module.named_buffers() if one.is_floating_point()}
    given = {"learning_rate": torch.tensor(RATE), "sample_mask": torch.ones(BATCH), **state}
    given |= {one.name: torch.zeros(one.shape) for one in step.inputs if one.role == "optimiser_state"}
    for inputs, labels in batches(name):
        given |= {"input": inputs, "label": labels}
        results = run(bytes(body), {value.name: given[value.name] for value in step.inputs})
        told = {value.name: one for value, one in zip(step.outputs, results, strict=True)}
        given |= {key.removeprefix("new."): one for key, one in told.items() if key.startswith("new.")}
    return {key: given[f"parameter.{key}"] for key, _ in module.named_parameters()}


def chance() -> tuple[object, object]:
    """What Python and NumPy would draw next."""
    state = np.random.get_state(legacy=False)
    return random.getstate(), repr(state)


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return float(torch.cat([(one[name].double() - other[name].double()).flatten() for name in other]).norm())


def test_what_everybody_shares_stays_as_it_is() -> None:
    before = dict(dict.items(user_modules.activation_registry))
    step_of("a registry that makes what it is asked for")
    assert dict(dict.items(user_modules.activation_registry)) == before


def test_there_are_forty_of_which_twenty_five_train() -> None:
    assert len(USER_MODULES) >= 40
    assert len(TRAINED) >= 25


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("name", "target"), CASES)
def test_after_ten_steps_it_is_as_near_as_eager(name: str, target: str) -> None:
    """Of double precision, to four times eager's own distance."""
    right, eager = eagerly(name, torch.float64), eagerly(name, torch.float32)
    assert distance(by_program(name, target), right) <= 4 * distance(eager, right)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_step_carries_is_refused_by_its_name(name: str) -> None:
    before = chance()
    with pytest.raises(ExportError, match=USER_MODULES[name].refused):
        write_program(step_of(name), target="onnx", program_id="0" * 64)
    assert chance() == before, "everybody else's numbers go on as they would have"


class Mixing(nn.Module):
    """A norm of its own over the batch, in a layer that has a name."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt()


def in_parts(module: nn.Module, size: int, **settings: Any) -> Step:
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
def test_micro_batches_of_what_mixes_a_batch_are_refused_with_the_layer(size: int, layer: nn.Module) -> None:
    """Of one sample, too, in which nothing shows: program and module are then wrong alike."""
    module = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, CLASSES))
    with pytest.raises(ExportError, match=r"layer '1' mixes the samples of a batch.*set micro_batch_size = 0"):
        in_parts(module, size)


@pytest.mark.parametrize("layer", [nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3)], ids=["gelu", "norm", "dropout"])
def test_micro_batches_of_what_takes_each_sample_by_itself_are_not(layer: nn.Module) -> None:
    in_parts(nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, CLASSES)), 1)


def test_a_hook_would_see_parts_of_a_batch() -> None:
    module = USER_MODULES["a hook that normalises"].make()
    with pytest.raises(ExportError, match=r"parameter '0\.weight' has a hook.*set micro_batch_size = 0"):
        in_parts(module, 2)
    in_parts(module, 2, one_part=True)
