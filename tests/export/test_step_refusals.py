"""Modules that cannot become a step: errors name the tensor or the layer, the reason and the remedy."""

import pytest
import torch
from export.step_rig import example, run, step_of_module
from torch import Tensor, nn

from subfleet.export.steps import SampleSpec, inference_step
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings


def test_state_of_another_type_is_refused() -> None:
    with pytest.raises(ExportError, match=r"tensor 'weight' is torch\.float64.*only holds torch\.float32; convert it"):
        step_of_module(nn.Linear(2, 2).double(), (2,))
    precise = nn.Linear(2, 2)
    precise.register_buffer("table", torch.zeros((), dtype=torch.float64))
    with pytest.raises(ExportError, match=r"tensor 'table' is torch\.float64.*persistent=False"):
        step_of_module(precise, (2,))


def test_a_constant_is_part_of_the_program() -> None:
    class Shifted(nn.Linear):
        offset: Tensor

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
            return super().forward(input + self.offset)

    module = Shifted(2, 2)
    module.register_buffer("offset", torch.tensor([1.0, 2.0]), persistent=False)
    step = step_of_module(module, (2,))
    assert not any(value.role == "buffer" for value in step.inputs)
    inputs = example(step)
    plain = step_of_module(nn.Linear(2, 2), (2,))
    expected = run(plain, inputs | {"input": inputs["input"] + module.offset})
    assert torch.equal(run(step, inputs)["loss"], expected["loss"])


def test_an_average_over_all_batches_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None))
    with pytest.raises(ExportError, match=r"layer '1' has momentum=None.*give it a number such as 0\.1"):
        step_of_module(module, (2,))
    step_of_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None, track_running_stats=False)), (2,))
    assert "1.num_batches_tracked" in module.state_dict()


def test_a_norm_of_other_channels_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(8))
    with pytest.raises(ExportError, match=r"layer '1' normalises.*the shape \(4, 4\), but needs .*8 channels"):
        step_of_module(module, (2,))


def test_inference_by_the_statistics_of_a_batch_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ExportError, match=r"layer '1' normalises by the statistics of its batch.*running statistics"):
        inference_step(module, SampleSpec(shape=(2,)), batch_size=2)


def test_a_norm_that_does_not_see_samples_is_refused() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            normalised: Tensor = self.norm(x.reshape(-1, 2)[1:])
            return x + normalised.sum()

    with pytest.raises(
        ExportError, match=r"layer 'norm' normalises.*\(11, 2\), but its first size must be a multiple of the batch's 4"
    ):
        step_of_module(Folded(), (3, 2), objective=ObjectiveSettings(name="mean_squared_error"))


def test_a_module_is_left_as_it_is() -> None:
    """Also after a refusal half-way."""
    module = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.BatchNorm1d(2).eval(), nn.AlphaDropout()
    )
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = [str(vars(layer)) for layer in module.modules()]  # modes and hooks among them
    with pytest.raises(ExportError, match="draws its own randomness"):
        step_of_module(module, (2,))
    step = step_of_module(module[:2], (2,), recompute=True)
    run(step, example(step))
    inference_step(module, SampleSpec(shape=(2,)), batch_size=2)
    assert [str(vars(layer)) for layer in module.modules()] == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_outputs_must_be_tensors() -> None:
    class Named(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
            return {"logits": super().forward(input)}  # type: ignore[return-value] # the case under test

    with pytest.raises(ExportError, match="the network returns dict, but must return a tensor of logits"):
        step_of_module(Named(2, 2), (2,))


@pytest.mark.parametrize("settings", [{"shape": (0,)}, {"shape": (2,), "dtype": "I64"}, {"shape": (2,), "limit": 3}])
def test_a_sample_must_be_possible(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a sample's"):
        SampleSpec(**settings)  # type: ignore[arg-type] # the case under test


def test_a_network_without_anything_to_train_is_refused() -> None:
    for module in (nn.Linear(2, 3).requires_grad_(requires_grad=False), nn.Flatten()):
        step = step_of_module(module, (2,))
        with pytest.raises(ExportError, match="the loss depends on no trainable parameter; give"):
            run(step, example(step))


def test_one_class_and_no_sample_are_refused() -> None:
    with pytest.raises(ExportError, match=r"of the shape \(4, 1\), but a single class is always correct; give it 2"):
        step_of_module(nn.Linear(2, 1), (2,))
    binary = step_of_module(nn.Linear(2, 1), (2,), objective=ObjectiveSettings(name="binary_cross_entropy"))
    assert float(run(binary, example(binary))["loss"]) > 0
    with pytest.raises(ExportError, match="the batch size is 0, but must be 1 or more"):
        step_of_module(nn.Linear(2, 2), (2,), batch_size=0)
