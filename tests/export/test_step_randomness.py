"""Random numbers that a network draws come from the step's inputs, with the distributions of PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from export.step_rig import assert_close, example, run, step_of_module
from torch import Tensor, nn

from subfleet.export.layers import LAYERS, LayerContext, LayerReplacing
from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec, inference_step
from subfleet.protocol.errors import ExportError

COUNT = 20_000


def replay(draw: Callable[[], Tensor], *numbers: Tensor) -> Tensor:
    with LayerReplacing(LAYERS, LayerContext(torch.ones(len(numbers[0])), numbers)):
        return draw()


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016) as in torchvision and timm."""

    def __init__(self, *, new: bool, whole: bool = False) -> None:
        super().__init__()
        self.new, self.whole = new, whole

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        size = (1 if self.whole else x.shape[0], *[1] * (x.dim() - 1))
        noise = x.new_empty(size) if self.new else torch.empty(size, dtype=x.dtype, device=x.device)
        noise = noise.bernoulli_(0.7)
        noise.div_(0.7)
        return x * noise


class Residual(nn.Module):
    """A branch that is skipped at random, and a head."""

    def __init__(self, path: nn.Module) -> None:
        super().__init__()
        self.branch, self.path, self.head = nn.Linear(4, 4), path, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x + self.path(self.branch(x)))
        return logits


@pytest.mark.parametrize("new", [True, False])
def test_stochastic_depth_follows_the_random_inputs_of_the_step(new: bool) -> None:
    step = step_of_module(Residual(DropPath(new=new)), (4,))
    assert [(value.name, value.shape) for value in step.inputs if value.role == "random"] == [("random.0", (4, 1))]
    inputs = example(step) | {"random.0": torch.tensor([[0.1], [0.69], [0.71], [0.0]], dtype=torch.float64)}
    assert_close(run(step, inputs), run(step, inputs), 0)
    mask = torch.tensor([[1.0], [1.0], [0.0], [1.0]], dtype=torch.float64) / 0.7
    hidden = inputs["input"] @ inputs["parameter.branch.weight"].T + inputs["parameter.branch.bias"]
    logits = (inputs["input"] + hidden * mask) @ inputs["parameter.head.weight"].T + inputs["parameter.head.bias"]
    loss = nn.functional.cross_entropy(logits[:3], inputs["label"][:3])  # the last one is padding
    torch.testing.assert_close(run(step, inputs)["loss"], loss)


@pytest.mark.export
@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_a_network_with_stochastic_depth_is_written(target: str) -> None:
    program = write_program(step_of_module(Residual(DropPath(new=False)), (4,)), target=target, program_id="drop path")
    assert [value.shape for value in program.manifest.inputs if value.role == "random"] == [(4, 1)]


def test_micro_batches_draw_what_the_batch_draws_or_are_refused() -> None:
    step_of_module(Residual(DropPath(new=True)), (4,), accumulate=True)
    step_of_module(Residual(DropPath(new=True, whole=True)), (4,))
    with pytest.raises(ExportError, match=r"layer 'path' draws numbers of the shape \(1, 1\) for a whole batch.*row"):
        step_of_module(Residual(DropPath(new=True, whole=True)), (4,), accumulate=True)


def test_uniform_numbers_come_from_the_step() -> None:
    numbers = uniform(4, 3)
    like = torch.zeros(4, 3)
    draws: list[Callable[[], Tensor]] = [
        lambda: torch.rand(4, 3),
        lambda: torch.rand((4, 3)),
        lambda: torch.rand(size=[4, 3], dtype=torch.float32),
        lambda: torch.rand_like(like),
        lambda: torch.empty(4, 3).uniform_(),
    ]
    for draw in draws:
        assert torch.equal(replay(draw, numbers), numbers)
    torch.testing.assert_close(replay(lambda: torch.empty(4, 3).uniform_(-2, 4), numbers), numbers * 6 - 2)
    assert replay(lambda: torch.rand(4, 3, dtype=torch.float16), numbers).dtype == torch.float16


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_bernoulli_numbers_have_their_probability(p: float) -> None:
    numbers = uniform(COUNT)
    chances = torch.full((COUNT,), p)
    draws: list[Callable[[], Tensor]] = [
        lambda: torch.empty(COUNT).bernoulli_(p),
        lambda: torch.bernoulli(chances),
        lambda: torch.bernoulli(chances, p=p),
        lambda: torch.zeros(COUNT).bernoulli_(chances),
    ]
    for draw in draws:
        samples = replay(draw, numbers)
        assert set(samples.tolist()) <= {0.0, 1.0}
        assert abs(float(samples.mean()) - p) < 0.01
        assert torch.equal(samples, (numbers < torch.tensor(p)).float())


def test_exponential_numbers_have_their_distribution() -> None:
    samples, _ = torch.sort(replay(lambda: torch.empty(COUNT).exponential_(2.0), uniform(COUNT)))
    distance = (1 - torch.exp(-2.0 * samples) - torch.arange(COUNT) / COUNT).abs().max()
    assert float(distance) < 1.95 / COUNT**0.5


def test_normal_numbers_have_their_distribution() -> None:
    draws: list[Callable[[], Tensor]] = [
        lambda: torch.randn(COUNT),
        lambda: torch.randn_like(torch.zeros(COUNT)),
        lambda: torch.empty(COUNT).normal_(),
        lambda: (torch.empty(COUNT).normal_(3.0, 2.0) - 3.0) / 2.0,
    ]
    for draw in draws:
        samples, _ = torch.sort(replay(draw, uniform(COUNT), uniform(COUNT, seed=1)))
        # Kolmogorov's distance exceeds 1.95 over the root of the count by chance once in a thousand times.
        distance = (torch.special.ndtr(samples) - torch.arange(COUNT) / COUNT).abs().max()
        assert float(distance) < 1.95 / COUNT**0.5
        assert bool(torch.isfinite(samples).all())
    edge = replay(lambda: torch.randn(2), torch.tensor([0.0, 1 - 2.0**-24]), torch.zeros(2))
    assert bool(torch.isfinite(edge).all())


class Drawing(nn.Module):
    """Adds random numbers to its input."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draw, self.head = draw, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x + self.draw(x))
        return logits


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randint(0, 2, x.shape),
        lambda x: torch.randperm(4),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.empty_like(x).cauchy_(),
        lambda x: torch.multinomial(x.abs(), 4),
    ],
    ids=["randint", "randperm", "normal", "cauchy_", "multinomial"],
)
def test_randomness_that_cannot_be_replayed_is_refused_with_a_remedy(draw: Callable[[Tensor], Any]) -> None:
    network = nn.Sequential(nn.Linear(4, 4), Drawing(draw))
    with pytest.raises(ExportError, match=r"layer '1' draws its own randomness.*draw with torch\.rand"):
        step_of_module(network, (4,))


def test_an_inference_model_takes_no_randomness() -> None:
    with pytest.raises(ExportError, match=r"layer '' draws at random in evaluation mode.*self\.training"):
        inference_step(Drawing(torch.rand_like), SampleSpec(shape=(4,)), batch_size=2)
    inference_step(Residual(DropPath(new=True)), SampleSpec(shape=(4,)), batch_size=2)
