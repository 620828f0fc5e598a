"""Steps that the tests share; together they cover every objective, optimiser, term and kind of batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from export.export_cases import largest, smallest
from torch import Tensor, nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.maps import nested_maps
from subfleet.export.steps import SampleSpec, Step, Student, training_step
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

PLAIN = OptimiserSettings(momentum=0.0)


TINY = Mlp(input_shape=(4,), class_count=3, widths=(8,), depths=(1,), group_size=4)


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
    """A classifier with two exits at increasing depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.exits = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = []
        for layer, head in zip(self.layers, self.exits, strict=True):
            x = torch.tanh(layer(x))
            logits.append(head(x))
        return tuple(logits)


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
