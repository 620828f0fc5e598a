"""Every wrong gradient of every network is caught: zero, swapped, of the opposite sign, or 10% too large."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, cast

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL, DENSE, MLP, RESNET, objective_of
from elastic.path_cases import CNN_PATH, POOLED_PATH, RNN_PATH
from elastic.recorded_cases import record_case
from elastic.token_cases import BERT, CLASSIFIER, DECODER, LSTM, VIT
from export.mutants import MUTATIONS, Again, Gradients, Mutation, Trained, gradients_of, swapped
from matrices import mostly_long
from torch import Tensor, nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.families import FAMILIES, PRESETS, preset, presets
from subfleet.elastic.network import Family
from subfleet.export.programs import write_program
from subfleet.export.request_steps import sample_of
from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.export.steps.reference import TrainingReference
from subfleet.export.verification.distances import VANISHING, Trial
from subfleet.export.verification.verifying import trials_of, verify_training, verify_trials
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = pytest.mark.slow

CONFIGS: dict[str, Family] = {
    **CONVOLUTIONAL,
    "fcn": DENSE["fcn"],
    "preact_resnet": RESNET,
    "mlp": MLP,
    "vit": VIT,
    "decoder": DECODER,
    "bert": BERT,
    "bert_classifier": CLASSIFIER,
    "lstm": LSTM,
    "choice_cnn": CNN_PATH,
    "choice_cnn pooled": POOLED_PATH,
    "choice_rnn": RNN_PATH,
    "published ds_cnn": presets.ds_cnn.settings,
}
OPTIMISERS = {
    "momentum": OptimiserSettings(),
    "decayed": OptimiserSettings(weight_decay=0.01, nesterov=True),
    "adam": OptimiserSettings(name="adam"),
    "adamw": OptimiserSettings(name="adamw", weight_decay=0.01),
    "plain": OptimiserSettings(momentum=0.0),
    "accumulated": OptimiserSettings(momentum=0.0, max_gradient_norm=0.1),
}


class UNet(nn.Module):
    """A U-Net of three sizes with skip connections."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            _two_convolutions(before, after) for before, after in zip([1, *sizes[:2]], sizes, strict=True)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in sizes[:2])
        self.merge = nn.ModuleList(_two_convolutions(2 * size, size) for size in sizes[:2])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for level in (1, 0):
            x = self.merge[level](torch.cat([skips[level], self.up[level](x)], 1))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _two_convolutions(before: int, after: int) -> nn.Sequential:
    layers = [
        part
        for width in (before, after)
        for part in (nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
    ]
    return nn.Sequential(*layers)


@cache
def step_of(name: str, optimiser: str) -> Step:
    settings: dict[str, Any] = {"optimiser": OPTIMISERS[optimiser], "batch_size": 6}
    if name == "U-Net":
        return training_step(UNet(), SampleSpec(shape=(1, 8, 8)), objective=ObjectiveSettings(), **settings)
    config = record_case("residual") if name == "recorded" else CONFIGS[name]
    network = network_of(config)
    accumulates = optimiser == "accumulated"
    return training_step(
        build_module(network, network.full_architecture()),
        sample_of(network),
        objective=objective_of(config),
        accumulate=accumulates,
        one_part=accumulates,
        **settings,
    )


def trials(step: Step) -> list[Trial]:
    """Trials of the first seed with an example in which most gradients are distinguishable.

    Examples are states after a first step, which may be saturated on some processors only.
    """
    for seed in range(1, 10):
        drawn = list(trials_of(step, torch.Generator().manual_seed(seed)))
        seen, hidden = distinguishable(step, drawn[0].example)
        if len(seen) > 0.6 * (len(seen) + len(hidden)):
            return drawn
    raise AssertionError("no example has mostly distinguishable gradients")


def repeat_trials(trained: Trained, known: Sequence[Trial]) -> list[Trial]:
    """The trials, to repeat for each mutation."""
    same = [Again(trial, trained.run(trial.example, lambda gradients: gradients)) for trial in known]
    return cast("list[Trial]", same)


def distinguishable(step: Step, example: Sequence[Tensor]) -> tuple[Gradients, list[str]]:
    """Gradients that exceed PyTorch's rounding tenfold and do not vanish, and the names of the other ones."""
    reference = step.reference
    assert isinstance(reference, TrainingReference)
    exact = reference.gradients(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in example))
    eager = reference.gradients(*example)
    rounding = {name: (eager[name] - gradient).norm() for name, gradient in exact.items()}
    mean_square = sum(gradient.norm() ** 2 for gradient in exact.values()) / sum(map(torch.numel, exact.values()))
    least = {name: VANISHING * (mean_square * gradient.numel()) ** 0.5 for name, gradient in exact.items()}
    seen = {name: part for name, part in exact.items() if part.norm() > max(10 * rounding[name], least[name])}
    return seen, [name for name in exact if name not in seen]


def test_every_family_is_among_them() -> None:
    assert {config.TYPE for config in CONFIGS.values()} | {"recorded"} == set(FAMILIES)


CASES = [(name, "momentum") for name in (*CONFIGS, "recorded", "U-Net")]
QUICK = [("preact_resnet", "decayed"), ("ds_cnn", "adam"), ("vit", "adamw"), ("vgg", "plain")]
QUICK += [("mobilenet_v2", "accumulated")]
CASES += QUICK
QUICK += [(name, "momentum") for name in ("bert_classifier", "choice_rnn", "fcn", "lstm", "mobilenet_v3", "U-Net")]
"""Every optimiser, and together every kind of layer of the families."""


@pytest.mark.parametrize(("name", "optimiser"), mostly_long(CASES, *QUICK))
def test_every_wrong_gradient_is_caught(name: str, optimiser: str) -> None:
    step = step_of(name, optimiser)
    trained, known = Trained(step), trials(step)
    verified = verify_trials(lambda example: trained.run(example, lambda gradients: gradients), known)
    seen, hidden = distinguishable(step, known[0].example)
    repeats = repeat_trials(trained, known)
    assert not [mutant for mutant, mutation in mutants_of(seen) if not is_caught(trained, repeats, mutation)]
    assert len(seen) > 0.6 * (len(seen) + len(hidden))
    if optimiser == "momentum":
        assert {f"new.momentum.{parameter}" for parameter in hidden} <= verified.unseen


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PRESETS)
def test_every_wrong_gradient_of_a_published_network_is_caught(name: str) -> None:
    """On a whole batch, where gradients may jump."""
    published: presets.PublishedNetwork = getattr(presets, name)
    config = published.settings
    config = config if len(config.input_shape) == 1 else preset(name, input_shape=(3, 32, 32), class_count=10)
    network = network_of(config)
    step = training_step(
        build_module(network, network.full_architecture()),
        sample_of(network),
        batch_size=6,
        objective=objective_of(config),
        optimiser=OPTIMISERS["momentum"],
    )
    verify_training(lambda example: step.run(*example), step, torch.Generator().manual_seed(0))
    known = [next(trials_of(step, torch.Generator().manual_seed(1)))]
    trained = Trained(step)
    seen, _ = distinguishable(step, known[0].example)
    repeats = repeat_trials(trained, known)
    assert not [mutant for mutant, mutation in mutants_of(seen) if not is_caught(trained, repeats, mutation)]


def mutants_of(gradients: Gradients) -> list[tuple[str, Mutation]]:
    mutants = [(f"{kind} {name}", make(name)) for name in gradients for kind, make in MUTATIONS.items()]
    mutants += [
        (f"swapped {name}", mutation) for name in gradients if (mutation := swapped(name, gradients)) is not None
    ]
    assert len(mutants) >= 3.5 * len(gradients)
    return mutants


def is_caught(trained: Trained, known: list[Trial], mutation: Mutation) -> bool:
    """Whether the error names a tensor with a wrong gradient; with joint clipping, any error counts."""
    try:
        verify_trials(lambda example: trained.run(example, mutation), known)
    except ExportError as error:
        return trained.clips or any(f".{name}'" in str(error) for name in trained.changed(known[0].example, mutation))
    return False


@pytest.mark.export
@pytest.mark.parametrize(
    ("kind", "target"),
    mostly_long(
        product((*MUTATIONS, "swapped"), TARGET_NAMES),
        ("scaled", "onnx"),
        ("swapped", "executorch"),
    ),
)
def test_a_program_with_a_wrong_gradient_is_not_written(target: str, kind: str) -> None:
    """The same for written programs."""
    step = step_of("bert_classifier", "momentum")
    gradients, _ = distinguishable(step, trials(step)[0].example)
    for name in ("section0.block0.norm1.weight", "head.bias"):
        mutation = swapped(name, gradients) if kind == "swapped" else MUTATIONS[kind](name)
        assert mutation is not None
        with gradients_of(step, mutation), pytest.raises(ExportError, match=r"'new\..*' is off by"):
            write_program(step, target=target, program_id="mutant")
