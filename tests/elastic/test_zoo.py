"""The zoo's networks: shapes, published sizes, gradients, and subnets of any width."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from subfleet.elastic.zoo import ZOO, ZooModel, build_seeded
from subfleet.elastic.zoo.perceptron import mlp
from subfleet.elastic.zoo.recurrent import char_lstm
from subfleet.elastic.zoo.transformer import (
    BlockSize,
    even_section,
    transformer_classifier,
    transformer_lm,
    vision_transformer,
)

TINY_SECTION = even_section(BlockSize(width=8, heads=3, head_width=2, hidden_width=6), 2)


def drawn(model: ZooModel, batch_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (batch_size, *model.sample_shape)
    if model.sample_dtype == "I64":
        return torch.randint(model.sample_limit, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def parameter_count(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


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


@pytest.mark.parametrize(
    ("build", "published"),
    [
        # McMahan et al. 2017, section 3: "2NN".
        (mlp, 199_210),
        # DeiT-Ti at 224x224 with 1,000 classes.
        (lambda: vision_transformer(input_shape=(3, 224, 224), patch=16, class_count=1000), 5_717_416),
        # Reddi et al. 2021, "Adaptive federated optimization": 820,522 with 90 symbols and one bias a layer, not two.
        (lambda: char_lstm(vocabulary=90, class_count=90), 820_522 + 2 * 1_024),
    ],
    ids=["2NN", "DeiT-Ti", "LSTM"],
)
def test_default_sizes_are_the_published_ones(build: Callable[[], nn.Module], published: int) -> None:
    assert parameter_count(build) == published


@pytest.mark.parametrize(
    ("build", "shape", "expected"),
    [
        (lambda: mlp(input_size=6, widths=(5, 3), class_count=2, activation=nn.SiLU), (2, 6), (2, 2)),
        (lambda: mlp(input_size=6, widths=(), class_count=2), (2, 6), (2, 2)),
        (lambda: vision_transformer(input_shape=(1, 8, 4), sections=TINY_SECTION), (2, 1, 8, 4), (2, 10)),
    ],
    ids=["mlp", "linear", "vit"],
)
def test_networks_of_any_width(
    build: Callable[[], nn.Module], shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert build()(torch.randn(shape, generator=torch.Generator().manual_seed(0))).shape == expected


def test_widths_are_those_of_the_tensors() -> None:
    attention = {name: tuple(tensor.shape) for name, tensor in transformer_lm(sections=TINY_SECTION).named_parameters()}
    assert attention["section0.block1.attention.query.weight"] == (6, 8)
    assert attention["section0.block1.attention.out.weight"] == (8, 6)
    assert attention["section0.block1.feed_forward.up.weight"] == (6, 8)


@pytest.mark.parametrize(
    "build",
    [
        lambda: transformer_lm(vocabulary=7, context=6, sections=TINY_SECTION),
        lambda: char_lstm(vocabulary=7, sections={"section0": {"block0": 5, "block1": 4}}),
    ],
    ids=["transformer", "lstm"],
)
def test_language_models_do_not_see_what_comes(build: Callable[[], nn.Module]) -> None:
    module = build()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = torch.tensor([[1, 2, 3, 4, 0, 6]])
    same = torch.isclose(module(tokens), module(changed)).all(dim=2)[0]
    assert same.tolist() == [True] * 4 + [False] * 2


def test_an_encoder_sees_all_tokens_from_the_first() -> None:
    module = transformer_classifier(vocabulary=7, context=6, sections=TINY_SECTION, class_count=3)
    logits = module(torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 0]]))
    assert logits.shape == (2, 3)
    assert not torch.isclose(logits[0], logits[1]).any()


def test_one_layer_for_queries_keys_and_values_is_three_side_by_side() -> None:
    apart, fused = (
        vision_transformer(input_shape=(1, 8, 4), sections=TINY_SECTION, fused=fused) for fused in (False, True)
    )
    state = apart.state_dict()
    for block in ("section0.block0", "section0.block1"):
        for kind in ("weight", "bias"):
            rows = [state.pop(f"{block}.attention.{name}.{kind}") for name in ("query", "key", "value")]
            state[f"{block}.attention.qkv.{kind}"] = torch.cat(rows)
    fused.load_state_dict(state)
    images = torch.randn(2, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fused(images), apart(images))


def test_a_seed_fixes_the_weights_and_leaves_the_global_state() -> None:
    before = torch.get_rng_state()
    first, again, other = (build_seeded(ZOO["mlp"], seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_every_entry_is_found_under_its_name() -> None:
    assert [model.name for model in ZOO.values()] == list(ZOO)
    assert all((model.sample_limit > 0) == (model.sample_dtype == "I64") for model in ZOO.values())
