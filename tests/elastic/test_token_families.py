"""Transformers and LSTMs: the shapes, outputs and gradients of their submodels."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from elastic.elastic_cases import relaxed
from elastic.plain_modules import Divisions, build_plain
from elastic.token_cases import (
    BERT,
    DECODER,
    LSTM,
    TOKEN_CONFIGS,
    TRANSFORMERS,
    VIT,
    double_state,
    inputs_of,
    load_module,
    token_cases,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.transformer_layers import BlockForm, TransformerBlock
from subfleet.elastic.maps import extract, tensor_maps
from subfleet.elastic.network import Family, Network
from subfleet.elastic.permuting import permute
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Explicit, Prefix
from subfleet.testing.submodels import find_held_elements

pytestmark = pytest.mark.slow


def scatter(network: Network, architecture: Architecture, local: dict[str, Tensor]) -> dict[str, Tensor]:
    dtype = next(iter(local.values())).dtype
    full = {name: torch.zeros(decl.shape, dtype=dtype) for name, decl in network.tensors.items()}
    for name, tensor_map in tensor_maps(network, architecture).items():
        tensor_map.scatter(local[name], full[name])
    return full


def with_whole(network: Network, architecture: Architecture, *kinds: str) -> Architecture:
    """The submodel with all axes of some kinds kept whole."""
    remaining = tuple(
        (name, index_set) for name, index_set in architecture.axes if network.axes[name].kind not in kinds
    )
    return replace(architecture, axes=remaining)


def with_all_blocks(network: Network, architecture: Architecture) -> Architecture:
    return replace(architecture, blocks=network.full_architecture().blocks)


def check_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-9 * float(expected.detach().abs().max()), rtol=0)


@relaxed
@given(case=token_cases())
def test_a_submodels_module_has_exactly_the_shapes_of_its_maps(case: tuple[Network, Architecture]) -> None:
    network, architecture = case
    module = build_module(network, architecture)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    local = extract(network, architecture, init_state(network, 0))
    assert shapes == network.shapes(architecture) == {name: tuple(tensor.shape) for name, tensor in local.items()}
    assert list(shapes) == list(network.shapes(architecture))
    config = network.config
    positions = config.input_shape if config.TYPE in {"bert", "decoder", "lstm"} else ()
    assert module.double()(inputs_of(config)).shape == (4, *positions, config.class_count)


@pytest.mark.parametrize("config", TOKEN_CONFIGS, ids=lambda config: config.TYPE)
@relaxed
@given(data=st.data())
def test_permuting_every_axis_alike_keeps_the_logits(config: Family, data: st.DataObject) -> None:
    network = network_of(config)
    state, inputs = double_state(network, 2), inputs_of(config)
    orders = {
        name: data.draw(st.permutations(range(axis.size)))
        for name, axis in network.axes.items()
        if axis.kind != "class"
    }
    full = network.full_architecture()
    check_close(
        load_module(network, full, permute(network, state, orders))(inputs), load_module(network, full, state)(inputs)
    )


@relaxed
@given(case=token_cases(configs=TRANSFORMERS))
def test_a_submodel_computes_what_the_full_network_does_with_all_else_set_to_zero(
    case: tuple[Network, Architecture],
) -> None:
    # LayerNorm sees the whole stream, so it is kept whole. A skipped block adds nothing, like a block of zeros.
    network, architecture = case[0], with_whole(*case, "embed")
    local = extract(network, architecture, double_state(network, 1))
    inputs = inputs_of(network.config)
    actual = load_module(network, architecture, local)(inputs)
    sizes = network.sizes(architecture)
    full = scatter(network, architecture, local)
    for name, axis in network.axes.items():
        if axis.kind == "head_dim":
            # Scores are divided by the root of the head width, which is larger in the full network.
            _scale_queries(full, name.removesuffix(".head_dim"), (axis.size / sizes[name]) ** 0.5)
    check_close(actual, load_module(network, network.full_architecture(), full)(inputs))


def _scale_queries(state: dict[str, Tensor], block: str, factor: float) -> None:
    for kind in ("weight", "bias"):
        fused = state.get(f"{block}.attention.qkv.{kind}")
        queries = state[f"{block}.attention.query.{kind}"] if fused is None else fused[: len(fused) // 3]
        queries *= factor


@relaxed
@given(case=token_cases())
def test_gradients_reach_what_a_submodel_holds_and_nothing_else(case: tuple[Network, Architecture]) -> None:
    # With all other elements set to zero, the elements outside the submodel are disconnected from the logits on both
    # sides if and only if the axes are tied correctly. The mean of LayerNorm keeps the stream connected.
    network, architecture = case[0], with_all_blocks(case[0], with_whole(*case, "embed"))
    local = extract(network, architecture, double_state(network, 3))
    module = load_module(network, network.full_architecture(), scatter(network, architecture, local))
    logits = module(inputs_of(network.config))
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).double()).sum().backward()
    held = find_held_elements(network, architecture)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        reached, expected = parameter.grad != 0, held[name]
        if name.endswith(("attention.key.bias", "attention.qkv.bias")):
            # A bias of keys shifts all scores of a query alike, which a softmax ignores.
            assert not (reached & ~expected).any(), name
        else:
            assert torch.equal(reached, expected), name


@pytest.mark.parametrize("config", [VIT, DECODER, LSTM], ids=lambda config: config.TYPE)
def test_a_skipped_block_is_not_there(config: Family) -> None:
    network = network_of(config)
    state, inputs = double_state(network, 4), inputs_of(config)
    skipped = network.blocks[-1].name
    architecture = Architecture(blocks=tuple(block.name for block in network.blocks[:-1]))
    module = build_plain(network, architecture).double().eval()
    assert not any(name.startswith(skipped) for name in network.shapes(architecture))
    module.load_state_dict(state, strict=False)
    assert torch.equal(
        load_module(network, architecture, extract(network, architecture, state))(inputs), module(inputs)
    )


@pytest.mark.parametrize("config", TRANSFORMERS, ids=lambda config: config.TYPE)
def test_blocks_of_a_transformer_start_as_the_identity(config: Family) -> None:
    network = network_of(config)
    state = {name: tensor.double() for name, tensor in init_state(network, 0).items()}
    bare = Architecture()
    inputs = inputs_of(config)
    full = load_module(network, network.full_architecture(), state)(inputs)
    assert torch.equal(full, load_module(network, bare, extract(network, bare, state))(inputs))


@pytest.mark.parametrize("config", TOKEN_CONFIGS, ids=lambda config: config.TYPE)
def test_only_causal_networks_ignore_later_tokens(config: Family) -> None:
    network, inputs = network_of(config), inputs_of(config)[:1]
    module = load_module(network, network.full_architecture(), double_state(network, 5))
    changed = inputs.clone()
    changed[..., -1] = (changed[..., -1] + 1) % network.symbols if network.symbols else 1
    same = torch.isclose(module(inputs), module(changed)).all(dim=-1)[0]
    if config.TYPE in {"decoder", "lstm"}:
        assert same.tolist() == [True] * 4 + [False]
    else:
        assert not same.any()


def test_one_layer_for_queries_keys_and_values_is_three_side_by_side() -> None:
    form = BlockForm(width=8, heads=3, head_width=2, hidden_width=6)
    apart, fused = (TransformerBlock(replace(form, fused=fused)) for fused in (False, True))
    state = apart.state_dict()
    for kind in ("weight", "bias"):
        rows = [state.pop(f"attention.{name}.{kind}") for name in ("query", "key", "value")]
        state[f"attention.qkv.{kind}"] = torch.cat(rows)
    fused.load_state_dict(state)
    stream = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fused(stream), apart(stream))


@pytest.mark.parametrize("config", TRANSFORMERS, ids=lambda config: config.TYPE)
def test_a_learnable_step_multiplies_what_a_block_adds(config: Family) -> None:
    network = network_of(replace(config, learnable_steps=True))
    full, inputs = network.full_architecture(), inputs_of(config)
    assert [name for name, decl in network.tensors.items() if decl.role == "step"] == [
        f"{block.name}.step" for block in network.blocks
    ]
    state = double_state(network, 7)
    assert list(load_module(network, full, state).state_dict()) == list(network.tensors)
    # A step of 1 changes nothing, 0 leaves the block out, and 2 doubles the last layers of both parts.
    last = network.blocks[-1].name
    stepless = load_module(network_of(config), full, {name: state[name] for name in network_of(config).tensors})
    ones = {name: torch.ones(1).double() for name in state if name.endswith(".step")}
    check_close(load_module(network, full, {**state, **ones})(inputs), stepless(inputs))
    without = replace(full, blocks=full.blocks[:-1])
    check_close(
        load_module(network, full, {**state, f"{last}.step": torch.zeros(1).double()})(inputs),
        load_module(network, without, extract(network, without, state))(inputs),
    )
    ends = [f"{last}.{part}.{kind}" for part in ("attention.out", "feed_forward.down") for kind in ("weight", "bias")]
    doubled = {**state, **ones, **{name: 2 * state[name] for name in ends}}
    check_close(
        load_module(network, full, {**state, **ones, f"{last}.step": torch.full((1,), 2.0).double()})(inputs),
        load_module(network, full, doubled)(inputs),
    )


def test_symbols_start_small_before_norms_and_large_before_others() -> None:
    wide = {"vocabulary": 40, "class_count": 40}
    stream = init_state(network_of(dataclasses.replace(DECODER, widths=(80, 80), **wide)), 0)  # type: ignore[arg-type]
    layers = init_state(network_of(dataclasses.replace(LSTM, embedding_width=80, **wide)), 0)  # type: ignore[arg-type]
    assert float(stream["tokens.embedding.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(layers["embedding.weight"].std()) == pytest.approx(1, rel=0.05)


def test_queries_keys_and_values_of_one_layer_are_cut_alike() -> None:
    network = network_of(VIT)
    axes = (("section0.block0.head_dim", Prefix(size=2)), ("section0.block0.heads", Explicit(indices=(2, 0))))
    tensor = torch.arange(36.0)
    rows = tensor_maps(network, Architecture(axes=axes))["section0.block0.attention.qkv.bias"].extract(tensor)
    # 3 kinds of 3 heads of 4 rows: heads 2 and 0 of each kind, the first 2 rows of each head.
    assert rows.tolist() == [8, 9, 0, 1, 20, 21, 12, 13, 32, 33, 24, 25]


def test_a_width_rate_keeps_all_heads_and_makes_each_narrower() -> None:
    network = network_of(VIT)
    sizes = network.sizes(uniform_space(network, (0.3,))[0])
    block = {name.removeprefix("section0.block0."): size for name, size in sizes.items() if "0.block0" in name}
    assert (sizes["stream"], block) == (3, {"heads": 3, "head_dim": 2, "hidden": 3})


def test_a_section_has_its_own_heads_and_each_block_its_own_axes() -> None:
    network = network_of(VIT)
    sizes = {name: axis.size for name, axis in network.axes.items()}
    assert sizes == {
        "class": 3,
        "stream": 10,
        **{f"section0.block{position}.heads": 3 for position in (0, 1)},
        **{f"section0.block{position}.head_dim": 4 for position in (0, 1)},
        **{f"section0.block{position}.hidden": 7 for position in (0, 1)},
        "section1.block0.heads": 2,
        "section1.block0.head_dim": 4,
        "section1.block0.hidden": 5,
    }
    assert [block.name for block in network.blocks] == ["section0.block1"]
    assert {axis.kind for axis in network.axes.values()} == {"class", "embed", "head", "head_dim", "ffn"}
    assert [network_of(BERT).axes[f"section0.block{number}.hidden"].size for number in range(3)] == [5, 8, 4]


@pytest.mark.parametrize("config", TRANSFORMERS, ids=lambda config: config.TYPE)
def test_a_scaler_divides_by_the_share_of_the_width_while_it_trains(config: Family) -> None:
    plain, scaled = network_of(config), network_of(replace(config, scaler=True))
    state, inputs = double_state(plain, 6), inputs_of(config)
    architecture = Architecture(
        axes=tuple((name, Prefix(size=1)) for name in sorted(plain.axes) if name.endswith(".hidden"))
    )
    local = extract(plain, architecture, state)
    usual, divided = load_module(plain, architecture, local), load_module(scaled, architecture, local)
    assert torch.equal(usual(inputs), divided(inputs))
    whole = load_module(scaled, scaled.full_architecture(), state).train()
    assert torch.equal(whole(inputs), load_module(plain, plain.full_architecture(), state)(inputs))
    # Dividing the input of GELU by the fraction is multiplying the layer before it.
    for name in (name for name in local if ".feed_forward.up." in name):
        local[name] = local[name] * plain.axes[name.split(".feed_forward")[0] + ".hidden"].size
    check_close(divided.train()(inputs), load_module(plain, architecture, local)(inputs))


def test_a_scaler_divides_embeddings_projections_and_what_joins_the_stream() -> None:
    network = network_of(replace(DECODER, scaler=True))
    axes = {
        name: Prefix(size=axis.size // 2) for name, axis in network.axes.items() if axis.kind in {"embed", "head_dim"}
    }
    module = build_module(network, Architecture(axes=tuple(sorted(axes.items()))))
    divisions = Divisions()
    with divisions:
        module.train()(inputs_of(DECODER))
    # Of embeddings; then for each block of queries, keys, values, what joins the stream, inside, what joins it.
    assert divisions.rates == [0.5, *(0.5, 0.5, 0.5, 0.5, 1.0, 0.5) * 2]


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (VIT, {"input_shape": (2, 6, 5)}, "patch is 2, but must divide height and width"),
        (VIT, {"patch": 0}, "patch is 0, but must be 1 or more"),
        (VIT, {"input_shape": (24,)}, r"must be \(channels, height, width\)"),
        (VIT, {"norm": "group"}, "norm is 'group'"),
        (VIT, {"widths": (10, 12)}, "share one stream"),
        (VIT, {"heads": ()}, "heads is empty"),
        (VIT, {"head_width": 0}, "must divide width 10"),
        (DECODER, {"vocabulary": 0}, "vocabulary is 0, but must be 1 or more"),
        (DECODER, {"input_shape": (5, 1)}, r"input_shape is \(5, 1\), but must be \(tokens,\)"),
        (LSTM, {"vocabulary": 0}, "vocabulary is 0, but must be 1 or more"),
        (LSTM, {"norm": "layer"}, "norm is 'layer'"),
    ],
)
def test_a_wrong_configuration_is_refused(config: Family, change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        network_of(dataclasses.replace(config, **change))
