"""The zoo's networks: shapes, published sizes, gradients, and widths."""

import pytest
import torch
from torch import Tensor, nn

from subfleet.elastic.zoo import ZOO, ZooModel, build_seeded
from subfleet.elastic.zoo.perceptron import mlp


def drawn(model: ZooModel, batch_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (batch_size, *model.sample_shape)
    if model.sample_dtype == "I64":
        return torch.randint(model.sample_limit, shape, generator=generator)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_network_gives_logits_and_a_gradient_to_every_parameter(name: str) -> None:
    model = ZOO[name]
    module = build_seeded(model, 0)
    logits = module(drawn(model, 3))
    tokens = model.sample_shape if model.objective == "next_token" else ()
    assert logits.shape == (3, *tokens, model.class_count)
    # A fixed random direction: the plain sum's gradient vanishes before a norm.
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    without = [
        name for name, parameter in module.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert without == []


def test_the_perceptron_is_as_large_as_published() -> None:
    # McMahan et al. 2017, section 3: "2NN".
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in mlp().parameters()) == 199_210


@pytest.mark.parametrize("widths", [(5, 3), ()])
def test_perceptrons_of_any_width(widths: tuple[int, ...]) -> None:
    inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    assert mlp(input_size=6, widths=widths, class_count=2, activation=nn.SiLU)(inputs).shape == (2, 2)


def test_a_seed_fixes_the_weights_and_leaves_the_global_state() -> None:
    before = torch.get_rng_state()
    first, again, other = (build_seeded(ZOO["mlp"], seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_every_entry_is_found_under_its_name() -> None:
    assert [model.name for model in ZOO.values()] == list(ZOO)
    assert all((model.sample_limit > 0) == (model.sample_dtype == "I64") for model in ZOO.values())
