"""References for programs: the unchanged module, in both precisions, on the real samples only."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from export.layer_cases import GROUPS, group_of
from export.step_cases import CASES
from export.step_rig import assert_close, draw, step_of_module
from torch import Tensor, nn
from torch.nn import functional

from subfleet.export.layers import LAYERS
from subfleet.export.layers.functions import FUNCTIONS
from subfleet.export.layers.losses import LOSSES
from subfleet.export.layers.random_layers import DRAWS, RANDOMNESS
from subfleet.export.steps import Step
from subfleet.export.steps.reference.replayed_randomness import RANDOM_LAYERS
from subfleet.export.steps.reference.step_references import ForwardReference, TrainingReference
from subfleet.export.verification.verifying import second_step
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo


def to_double(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)


def assert_alike(step: Step, *, tolerance: float = 1e-10, **options: Any) -> None:
    """Assert that the step and its reference give the same numbers in double precision."""
    generator = torch.Generator().manual_seed(0)
    example = to_double(second_step(step, generator, **options))
    names = [value.name for value in step.outputs]
    actual, expected = (dict(zip(names, run(*example), strict=True)) for run in (step.run, step.reference))
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max()))
        assert_close({name: actual[name] / scale}, {name: tensor / scale}, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_step_is_its_reference(name: str) -> None:
    step = CASES[name]()
    # Corrections of Adam's moments are inputs in single precision, and exact in PyTorch.
    tolerance = 1e-6 if any("moment" in value.name for value in step.inputs) else 1e-10
    assert_alike(step, tolerance=tolerance)
    assert_alike(step, tolerance=tolerance, apply=False, sample_count=3)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_layer_is_that_of_pytorch(group: str) -> None:
    module, sample = group_of(group)
    assert_alike(step_of_module(module, (), sample=sample, batch_size=3))


class Dropping(nn.Module):
    """Every random layer, with the usual layouts of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.4), nn.Dropout(0.3, inplace=True))
        self.lines = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Dropout1d(0.4))
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3)
        self.weighing = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(4, 3, 3, dropout=0.4, bidirectional=True)
        self.gru = nn.GRU(6, 4, 2, dropout=0.4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.images(x).flatten(2).transpose(1, 2) + self.lines(x.flatten(2))[..., :9].transpose(1, 2)
        time_first = tokens.transpose(0, 1)
        attended = self.attention(time_first, time_first, time_first, need_weights=False)[0]
        attended = functional.dropout(attended, 0.2, self.training).transpose(0, 1)
        weighted = self.weighing(attended, attended, attended)[0].reshape(-1, 1, 3, 4)
        windows = functional.scaled_dot_product_attention(weighted, weighted, weighted, dropout_p=0.3)
        series, _ = self.lstm(windows.reshape(len(x), 9, 4).transpose(0, 1))
        hidden, _ = self.gru(series.transpose(0, 1))
        logits: Tensor = self.head(hidden[:, -1])
        return logits


@pytest.mark.slow
def test_layers_drop_by_the_random_inputs_of_the_step() -> None:
    assert_alike(step_of_module(Dropping(), (2, 5, 5), batch_size=4), sample_count=2)


def test_every_random_replacement_has_a_reference() -> None:
    """A replacement that takes random numbers without an entry here would be compared with PyTorch's own ones."""
    drawing = {function for function, layer in LAYERS.items() if "refuse" not in layer.__qualname__}
    deterministic = {functional.rms_norm, *FUNCTIONS, *LOSSES, *RANDOMNESS.keys() - DRAWS.keys()}
    assert drawing - deterministic <= {*RANDOM_LAYERS, *DRAWS}


@pytest.mark.parametrize("batch_size", [1, 2])
def test_one_value_for_each_channel(batch_size: int) -> None:
    """PyTorch refuses to train on it; the test compares with its kernel, which has no such check."""
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    assert_alike(step_of_module(module, (5,), batch_size=batch_size))


def reference_of(module: nn.Module) -> ForwardReference:
    """The reference of a module that takes two vectors of four numbers."""
    parameters = (
        ValueInfo(name=f"parameter.{name}", dtype="F32", shape=tuple(tensor.shape), role="parameter", tensor=name)
        for name, tensor in module.named_parameters()
    )
    sample = ValueInfo(name="input", dtype="F32", shape=(2, 4), role="input")
    return ForwardReference(module=module, objective=None, inputs=(sample, *parameters))


class Stubborn(nn.Module):
    """Requests single precision in every way, and keeps tensors where `to` does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.tied = self.layer
        self.parts = {"scale": [torch.tensor([1 / 3, 2 / 3, 3.0])]}
        with torch.enable_grad():
            self.made = self.layer.weight * 2  # a result of an operation, which PyTorch itself refuses to copy
        self.register_buffer("kept", torch.full((3,), 1 / 7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x.float()).to(torch.float32) + torch.arange(3, dtype=torch.float32) / 3
        hidden = functional.linear(hidden, torch.eye(3) / 3) * self.parts["scale"][0]
        logits: Tensor = (hidden * _SHIFT).add_(self.get_buffer("kept")) + self.tied(x) + self.made.sum() * 0
        return logits


_SHIFT = torch.tensor([1.0, 0.1, 0.2])


def test_any_module_is_run_in_double_precision() -> None:
    module = Stubborn()
    inputs, weight, bias = draw(2, 4), draw(3, 4, seed=1), draw(3, seed=2)
    (actual,) = reference_of(module)(inputs, weight, bias)
    hidden = inputs @ weight.T + bias
    (scale,), shift = module.parts["scale"], _SHIFT.double()
    expected = (hidden + torch.arange(3) / torch.tensor(3.0, dtype=torch.float64)) / 3 * scale.double() * shift
    expected = expected + torch.tensor(1 / 7, dtype=torch.float32).double() + hidden
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


def test_the_module_stays_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5).eval(), nn.Linear(6, 3))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    step = step_of_module(module, (4,))
    step.reference(*to_double(step.example(torch.Generator().manual_seed(0))))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert [layer.training for layer in module] == [True, True, False, True]
    assert all(parameter.grad is None for parameter in module.parameters())


class Locked(nn.Module):
    """Holds an object that cannot be copied, or computes where the precision cannot be changed."""

    def __init__(self, *, has_lock: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.lock = threading.Lock() if has_lock else None

    def forward(self, x: Tensor) -> Tensor:
        with torch.DisableTorchFunction():
            outputs: Tensor = self.layer(x.float())
        return outputs


@pytest.mark.parametrize(
    ("has_lock", "message"),
    [(True, "cannot be copied.*lock"), (False, r"cannot be run in torch\.float64 as it is, so no program .* verified")],
)
def test_modules_without_a_reference_are_errors(message: str, *, has_lock: bool) -> None:
    module = Locked(has_lock=has_lock)
    with pytest.raises(ExportError, match=message):
        reference_of(module)(*(torch.ones(shape, dtype=torch.float64) for shape in ((2, 4), (3, 4), (3,))))


def test_a_step_without_its_randomness_is_an_error() -> None:
    step = step_of_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)), (4,))
    reference = step.reference
    assert isinstance(reference, TrainingReference)
    example = step.example(torch.Generator().manual_seed(0))
    without = replace(reference, module=nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 3)))
    with pytest.raises(ExportError, match="used 1 fewer random inputs than its step"):
        without(*example)
    more = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), nn.Linear(4, 3))
    with pytest.raises(ExportError, match="uses more random inputs than its step"):
        replace(reference, module=more)(*example)
    wider = nn.Sequential(nn.Linear(4, 4), nn.Dropout1d(0.5), nn.Linear(4, 3))
    with pytest.raises(ExportError, match=r"draws numbers of the shape \(3, 1\).* draws \(3, 4\)"):
        replace(reference, module=wider)(*example)
