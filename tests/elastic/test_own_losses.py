"""A loss of a user's own is recorded, and computes what the function does for each label."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from elastic.recorded_cases import Branches
from torch import Tensor, nn
from torch.nn import functional

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.growing import resize
from subfleet.elastic.recording.loading import make_loss, record_network
from subfleet.elastic.recording.record import pack_record, unpack_record
from subfleet.elastic.recording.replaying import ReplayedModule
from subfleet.elastic.unions import unite_families
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHTS = torch.linspace(0.5, 1.5, 5)


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def compare_classes(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - functional.one_hot(labels, 5)).square().mean(1)


def of_tokens(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.transpose(1, 2), labels, WEIGHTS[:3], reduction="none")


def of_pixels(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")


def of_numbers(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.maximum(0.9 * (targets - outputs), 0.1 * (outputs - targets))


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 1))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def record(module: nn.Module, loss: Loss | nn.Module, shape: tuple[int, ...] = (2, 4, 4), **options: Any) -> Recorded:
    return record_network(module, shape, loss=loss, **options)


def find_loss(family: Recorded, architecture: Architecture | None = None) -> Loss:
    module = build_module(network_of(family), architecture or network_of(family).full_architecture())
    assert isinstance(module, ReplayedModule)
    assert module.own_loss is not None
    return module.own_loss


@pytest.mark.parametrize("loss", [focal, compare_classes, nn.CrossEntropyLoss(WEIGHTS, reduction="none")])
def test_it_computes_what_the_function_does(loss: Loss) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn((7, 5), generator=generator, requires_grad=True)
    labels = torch.randint(5, (7,), generator=generator)
    own = find_loss(record(Branches(), loss))
    assert torch.equal(own(outputs, labels), loss(outputs, labels))
    gradients = [torch.autograd.grad(of(outputs, labels).sum(), outputs)[0] for of in (own, loss)]
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0


def test_outputs_have_the_classes_where_the_module_has_them() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, labels = torch.randn((3, 4, 4, 5), generator=generator), torch.randint(5, (3, 4, 4), generator=generator)
    own = find_loss(record(pixels(), of_pixels))
    assert torch.equal(own(outputs, labels), of_pixels(outputs.movedim(-1, 1), labels))
    outputs, labels = torch.randn((2, 6, 3), generator=generator), torch.randint(3, (2, 6), generator=generator)
    own = find_loss(record(tokens(), of_tokens, (6,), symbols=11))
    assert torch.equal(own(outputs, labels), of_tokens(outputs, labels))


def test_labels_that_do_not_count_are_classes_for_it() -> None:
    own = find_loss(record(Branches(), focal))
    outputs, labels = torch.eye(5)[:2], torch.tensor([-1, 3])
    assert torch.equal(own(outputs, labels), focal(outputs, labels.clamp(0)))


def test_labels_may_be_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn((2, 4, 5), generator=generator)
    family = record(Branches(), of_numbers)
    assert torch.equal(find_loss(family)(outputs, targets), of_numbers(outputs, targets))
    loss = family.record().loss
    assert loss is not None
    assert loss.symbols == 0


def test_submodels_grown_networks_and_unions_have_it() -> None:
    family = record(Branches(), focal)
    network = network_of(family)
    (axis, *_) = (axis for axis in network.axes.values() if axis.copied and axis.kind == "channel")
    wider = resize(network, {axis.name: 2 * axis.size})
    assert isinstance(wider, Recorded)
    outputs, labels = torch.eye(5)[:3], torch.tensor([0, 3, 4])
    for own in (find_loss(family, Architecture()), find_loss(wider)):
        assert torch.equal(own(outputs, labels), focal(outputs, labels))
    assert unite_families([family, wider]) == wider
    plain = replace(family, recording=pack_record(replace(family.record(), loss=None)))
    with pytest.raises(ConfigError, match="have no union, because their own losses differ"):
        unite_families([plain, wider])
    again = unpack_record(family.recording)
    assert again.loss is not None
    assert pack_record(again) == family.recording


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            functional.cross_entropy,
            r"it returns a tensor of shape \(\) for labels of shape \(3,\), but must return the",
        ),
        (lambda outputs, labels: 3, "it returns int for labels"),
        (lambda outputs, labels: outputs.nothing(), "it fails: 'Tensor' object has no attribute 'nothing'"),
        (lambda outputs, labels: focal(outputs, labels) if labels.sum() > 3 else labels * 1.0, "use torch.where"),
    ],
)
def test_what_is_no_loss_of_each_label_is_refused(loss: Loss, message: str) -> None:
    with pytest.raises(ConfigError, match=f"the loss cannot be recorded: with classes as labels, .*{message}"):
        record(Branches(), loss)


def test_a_name_is_imported() -> None:
    outputs, targets = torch.eye(2)[:1], torch.ones(1, 2)
    assert make_loss("torch.nn.functional:mse_loss")(outputs, targets).item() == pytest.approx(0.5)
    assert make_loss("torch.nn:MSELoss")(outputs, targets).item() == pytest.approx(0.5)
    with pytest.raises(ConfigError, match=r"loss is 'mse_loss', but must be like 'package\.file:function'"):
        make_loss("mse_loss")
