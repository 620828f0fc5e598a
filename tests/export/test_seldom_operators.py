"""Rare operators train as in PyTorch, or are refused with a hint what to use instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrices import crossed
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from subfleet.export.preflight import explain_failure
from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec, training_step
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = pytest.mark.export

VECTOR = SampleSpec(shape=(8,))
IMAGE = SampleSpec(shape=(1, 8, 8))
TOKENS = SampleSpec(shape=(6,), dtype="I64", limit=50)


class Within(nn.Module):
    """A layer or function of 16 numbers between two linear layers."""

    def __init__(self, layer: Callable[[Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(8, 16), layer, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layer(self.first(x)).flatten(1))
        return logits


class Distances(nn.Module):
    """Distances of the input from trainable centres."""

    def __init__(self, distance: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.centres, self.distance = nn.Parameter(torch.linspace(-1, 1, 7 * 16).reshape(7, 16)), distance

    def forward(self, x: Tensor) -> Tensor:
        return self.distance(x, self.centres)


class Twice(nn.Module):
    """A layer with two inputs, called with the same one twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x, x)
        return outputs


def _image(layer: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer, nn.Flatten(), nn.Linear(width, 5))


def _square(y: Tensor) -> Tensor:
    return y.reshape(-1, 4, 4)


TRAINED: dict[str, tuple[nn.Module, SampleSpec]] = {
    "bag of sums": (nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(8, 5)), TOKENS),
    "bag of means": (nn.Sequential(nn.EmbeddingBag(50, 8, padding_idx=3), nn.Linear(8, 5)), TOKENS),
    "local response": (_image(nn.LocalResponseNorm(3), 256), IMAGE),
    "spectral norm": (Within(parametrizations.spectral_norm(nn.Linear(16, 16))), VECTOR),
    "cosine": (Within(Distances(lambda x, w: functional.cosine_similarity(x[:, None], w[None], dim=-1)), 7), VECTOR),
    "distances": (Within(Distances(torch.cdist), 7), VECTOR),
    "pairwise": (Within(lambda y: functional.pairwise_distance(y, y * 2 + 1, keepdim=True), 1), VECTOR),
    "bilinear": (Within(Twice(nn.Bilinear(16, 16, 6)), 6), VECTOR),
    "product": (Within(lambda y: y.prod(-1, keepdim=True), 1), VECTOR),
    "products": (Within(lambda y: torch.cumprod(y, -1)), VECTOR),
    "diagonal": (Within(lambda y: torch.diagonal(_square(y), dim1=1, dim2=2), 4), VECTOR),
    "other diagonal": (Within(lambda y: torch.diagonal(_square(y), 1, 2, 1), 3), VECTOR),
    "between": (Within(lambda y: torch.clamp(torch.lerp(y, y * 2, 0.3), y * 0 - 1, y * 0 + 1)), VECTOR),
    "remainders": (Within(lambda y: torch.fmod(y, 2.0) + torch.remainder(y, 2.0) + torch.trunc(y)), VECTOR),
    "hypotenuse": (Within(lambda y: torch.hypot(y, y + 1)), VECTOR),
    "waves": (Within(lambda y: torch.sinc(y) + torch.tan(y * 0.1) + torch.sinh(y) + torch.asinh(y)), VECTOR),
    "odds": (Within(lambda y: torch.logit(torch.sigmoid(y)) + functional.threshold(y, 0.1, 2.0)), VECTOR),
    "bicubic": (_image(nn.Upsample(scale_factor=2, mode="bicubic"), 1024), IMAGE),
    "corners": (_image(nn.Upsample((5, 11), mode="bicubic", align_corners=True), 220), IMAGE),
    "windows": (_image(nn.Unfold(3, dilation=2, padding=1, stride=(1, 2)), 4 * 9 * 6 * 3), IMAGE),
    "window sums": (_image(nn.Sequential(nn.Unfold(3, padding=1), nn.Fold((9, 9), 2)), 729), IMAGE),
    "buckets": (Within(lambda y: y + torch.bucketize(y.detach(), torch.linspace(-1, 1, 5)).float()), VECTOR),
}
REFUSED: dict[str, tuple[nn.Module, SampleSpec, str]] = {
    "sort": (Within(lambda y: y.sort(dim=-1).values), VECTOR, "use amax or amin for the largest"),
    "topk": (Within(lambda y: y.topk(4).values, 4), VECTOR, "use amax or amin for the largest"),
    "inverse": (
        Within(lambda y: torch.linalg.inv(_square(y) + 5 * torch.eye(4))),
        VECTOR,
        "products of matrices, as Newton-Schulz",
    ),
    "Fourier": (Within(lambda y: torch.fft.rfft(y).abs(), 9), VECTOR, "fixed matrices of sines and cosines"),
    "gamma": (Within(lambda y: torch.lgamma(y.abs() + 1)), VECTOR, "functions made of exp, log, tanh and erf"),
    "random slopes": (Within(nn.RReLU()), VECTOR, r"layer 'layer' \(RReLU\).*it draws.*use nn.LeakyReLU"),
    "norms of rows": (
        nn.Sequential(nn.Embedding(50, 8, max_norm=1.0), nn.Flatten(), nn.Linear(48, 5)),
        TOKENS,
        "leave out max_norm",
    ),
    "no number": (Within(torch.sqrt), VECTOR, "is NaN or infinite in PyTorch.*keep roots"),
}


def write_module(module: nn.Module, sample: SampleSpec, target: str) -> Any:
    step = training_step(module, sample, batch_size=4, objective=ObjectiveSettings(), optimiser=OptimiserSettings())
    return write_program(step, target=target, program_id="0" * 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    crossed(TRAINED, TARGET_NAMES, "bag of means", "buckets", "local response", "other diagonal", "products", "waves"),
)
def test_rare_operators_are_written_and_verified(name: str, target: str) -> None:
    module, sample = TRAINED[name]
    assert write_module(module, sample, target).manifest.max_abs_diff < 1e-4


@pytest.mark.parametrize(("name", "target"), crossed(REFUSED, TARGET_NAMES, "no number", "sort"))
def test_unsupported_operators_are_refused_with_an_alternative(name: str, target: str) -> None:
    module, sample, words = REFUSED[name]
    with pytest.raises(ExportError) as caught:
        write_module(module, sample, target)
    explained = explain_failure(caught.value, module, sample, target=target, batch_size=4)
    assert "lowering" not in str(explained)
    with pytest.raises(ExportError, match=words):
        raise explained
