"""A padded and masked batch gives exactly the step of the unpadded batch, whatever the padding contains."""

from collections.abc import Callable

import pytest
import torch
from export.step_rig import assert_close, example, load_values, next_inputs, run, step_of_module
from matrices import mostly_long
from torch import Tensor, nn

from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

REAL, PADDED = 3, 8


class Residual(nn.Module):
    """A pre-activation block with the given norm."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(4)
        self.layer = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.layer(torch.relu(self.norm(x)))
        return x + added


def images(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), Residual(norm), Residual(norm), nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, 3)
    )


def vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def series() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.BatchNorm1d(4, affine=False),
        nn.GELU(),
        nn.Dropout1d(0.4),
        nn.Conv1d(4, 4, 3),
        nn.BatchNorm1d(4, momentum=0.3),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


class NormalisedTokens(nn.Module):
    """A norm over all tokens of all samples, whose outermost dimension is the sample or the token."""

    def __init__(self, *, outermost: str = "sample") -> None:
        super().__init__()
        self.place = int(outermost == "token")
        self.embed, self.norm, self.last = nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).transpose(0, self.place)
        normal = self.norm(y.flatten(0, 1)).reshape_as(y).transpose(0, self.place)
        logits: Tensor = self.last(normal.relu().mean(1))
        return logits


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Dropout(0.2), nn.Linear(6, 7))


def untracked(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, track_running_stats=False)


def frozen(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels).eval()


IMAGES = SampleSpec(shape=(2, 5, 5))
CASES: dict[str, tuple[Callable[[], nn.Module], SampleSpec, str]] = {
    "BatchNorm2d": (lambda: images(nn.BatchNorm2d), IMAGES, "cross_entropy"),
    "BatchNorm2d of the batch alone": (lambda: images(untracked), IMAGES, "cross_entropy"),
    "frozen BatchNorm2d": (lambda: images(frozen), IMAGES, "cross_entropy"),
    "GroupNorm": (lambda: images(lambda channels: nn.GroupNorm(2, channels)), IMAGES, "cross_entropy"),
    "BatchNorm1d of vectors": (vectors, SampleSpec(shape=(5,)), "cross_entropy"),
    "BatchNorm1d of series": (series, SampleSpec(shape=(2, 7)), "mean_squared_error"),
    "BatchNorm1d of tokens": (NormalisedTokens, SampleSpec(shape=(4, 2)), "cross_entropy"),
    "next token": (tokens, SampleSpec(shape=(5,), dtype="I64", limit=7), "next_token"),
    "binary": (vectors, SampleSpec(shape=(5,)), "binary_cross_entropy"),
}


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_nothing(name: str) -> None:
    build, sample, objective = CASES[name]
    module = build()
    settings = {
        "objective": ObjectiveSettings(name=objective),  # type: ignore[arg-type] # one of the names
        "optimiser": OptimiserSettings(momentum=0.5, max_gradient_norm=0.1),
        "sample": sample,
    }
    small = step_of_module(module, (), batch_size=REAL, **settings)
    large = step_of_module(module, (), batch_size=PADDED, **settings)
    inputs = example(small)
    padded = example(large, seed=1) | {key: value for key, value in inputs.items() if key.partition(".")[0] != "random"}
    for value in small.inputs:
        if value.role in ("input", "label", "random"):
            garbage = example(large, seed=2)[value.name] * (
                1 if value.dtype == "I64" or value.role == "random" else 100
            )
            padded[value.name] = torch.cat([inputs[value.name], garbage[REAL:]])
    inputs["sample_mask"] = torch.ones(REAL, dtype=torch.float64)
    padded["sample_mask"] = (torch.arange(PADDED) < REAL).double()
    assert_close(run(large, padded), run(small, inputs))


@pytest.mark.export
@pytest.mark.slow
def test_a_norm_of_tokens_before_samples_is_refused() -> None:
    step = step_of_module(NormalisedTokens(outermost="token"), (4, 2), batch_size=PADDED)
    with pytest.raises(ExportError, match="mixes the samples of a batch"):
        write_program(step, target="onnx", program_id="0" * 64)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, untracked, frozen])
def test_batch_norm_is_that_of_pytorch_on_the_unpadded_batch(norm: Callable[[int], nn.Module]) -> None:
    """Two steps: loss, parameters, running mean and the unbiased running variance."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.Flatten(), nn.Linear(36, 3))

    step = step_of_module(build(), (2, 5, 5), batch_size=5)
    inputs = example(step)
    inputs["input"] = inputs["input"] * 3 + 20  # far from 0, where a variance by the mean of squares loses its digits
    module = load_values(build(), inputs)
    optimiser = torch.optim.SGD(module.parameters(), lr=float(inputs["learning_rate"]))
    for _ in range(2):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs["input"][:4]), inputs["label"][:4])
        loss.backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
        optimiser.step()
        results = run(step, inputs)
        torch.testing.assert_close(results["loss"], loss.detach(), atol=1e-12, rtol=1e-12)
        inputs |= next_inputs(results)
    state = {name: tensor for name, tensor in module.state_dict().items() if "num_batches" not in name}
    names = {value.tensor: value.name for value in step.inputs if value.tensor}
    assert_close({name: inputs[names[name]] for name in state}, state, 1e-11)


def test_a_batch_without_a_real_sample_changes_nothing() -> None:
    step = step_of_module(vectors(), (5,))
    inputs = example(step) | {"sample_mask": torch.zeros(4, dtype=torch.float64)}
    results = run(step, inputs)
    assert results["loss"] == results["correct"] == results["count"] == 0
    assert_close(next_inputs(results), {name: inputs[name] for name in next_inputs(results)}, 0)


def test_one_real_value_says_nothing_of_a_variance() -> None:
    """PyTorch refuses such a batch; here it is the end of a data set, and the running variance does not change."""
    step = step_of_module(vectors(), (5,))
    inputs = example(step) | {"sample_mask": torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)}
    results = run(step, inputs)
    hidden = inputs["input"][0] @ inputs["parameter.0.weight"].T + inputs["parameter.0.bias"]
    mean = 0.9 * inputs["buffer.1.running_mean"] + 0.1 * hidden
    assert_close({"": results["new.buffer.1.running_mean"]}, {"": mean})
    assert torch.equal(results["new.buffer.1.running_var"], inputs["buffer.1.running_var"])
    assert all(bool(result.isfinite().all()) for result in results.values())


class Deep(nn.Module):
    """Many blocks, each with a batch norm."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(depth)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("real_count", mostly_long([3, 2], 2))
def test_padding_stays_finite(real_count: int) -> None:
    """Norms ignore padding, so each could take it further from 0; and infinity times a mask of 0 is NaN."""
    step = step_of_module(Deep(300), (6,), batch_size=4)
    inputs = step.example(torch.Generator().manual_seed(0), sample_count=real_count)
    assert all(bool(torch.isfinite(result).all()) for result in step.run(*inputs))
