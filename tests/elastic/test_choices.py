"""Networks with choices: paths and subspaces of supernets compute what the whole computes on them (O4)."""

import math
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from elastic.token_cases import inputs_of
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.families.choice_block import draw
from subfleet.elastic.families.records.choices import CONVOLUTION_OPERATORS, SEQUENCE_OPERATORS, ChoiceCnn, ChoiceRnn
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.inheriting import inherit
from subfleet.elastic.lineage import Chosen
from subfleet.elastic.network import Family, Network
from subfleet.elastic.supernets import path_architecture, specialise_family
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture

CNN = ChoiceCnn(
    input_shape=(2, 8, 8),
    class_count=3,
    widths=(4, 8),
    depths=(1, 2),
    last_widths=(4,),
    operators=(CONVOLUTION_OPERATORS,),
    group_size=2,
)
RNN = ChoiceRnn(
    input_shape=(5,), vocabulary=6, class_count=6, widths=(4, 6), depths=(2, 1), operators=(SEQUENCE_OPERATORS,)
)
SUPERNETS: tuple[Family, ...] = (
    CNN,
    replace(CNN, norm="batch", reduction="pool", stem_stride=2),
    replace(CNN, norm="none", operators=(("conv3", "identity"), ("dsconv1_double",), ("mbconv1_double", "mbconv3"))),
    RNN,
)
supernet = cache(network_of)
"""Each network is declared once."""


@st.composite
def paths(draw: st.DrawFn) -> tuple[Network, Architecture]:
    network = supernet(draw(st.sampled_from(SUPERNETS)))
    return network, path_architecture(
        network, [draw(st.sampled_from(choice.operators)) for choice in network.choices.values()]
    )


@st.composite
def subspaces(draw: st.DrawFn) -> tuple[Network, Architecture]:
    network = supernet(draw(st.sampled_from(SUPERNETS)))
    choices = [
        (name, tuple(operator for operator in choice.operators if operator in subset))
        for name, choice in network.choices.items()
        if (subset := draw(st.sets(st.sampled_from(choice.operators), min_size=1))) != set(choice.operators)
    ]
    return network, replace(network.full_architecture(), choices=tuple(choices))


def draw_state(network: Network) -> dict[str, Tensor]:
    """Weights other than zero and one, and variances above zero."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - (0.4 if tensor.dim() > 1 else -0.1)
        for name, tensor in init_state(network, 1).items()
    }


def compute_gradients(
    network: Network, architecture: Architecture, state: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    module = build_module(network, architecture).double()
    module.load_state_dict({name: state[name] for name in module.state_dict()})
    outputs: Tensor = module.eval()(inputs_of(network.config))
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).reshape(outputs.shape)
    named = dict(module.named_parameters())
    values = torch.autograd.grad((outputs * weights).sum(), list(named.values()))
    return outputs, dict(zip(named, values, strict=True))


@pytest.mark.slow
@examples(15)
@given(case=paths())
def test_a_realised_path_gives_what_the_supernet_gives_on_it_and_learns_the_same(
    case: tuple[Network, Architecture],
) -> None:
    """Both are equal to the bit (O4)."""
    network, path = case
    state = draw_state(network)
    alone = network_of(specialise_family(network, path))
    assert not alone.choices
    assert {name: decl.shape for name, decl in alone.tensors.items()} == dict(network.shapes(path))
    held = {name: tensor.float() for name, tensor in state.items()}
    inherited = inherit(Chosen(), alone, network, held, seed=1)
    assert all(torch.equal(tensor, held[name]) for name, tensor in inherited.items())
    own_state = {name: tensor.double() for name, tensor in inherited.items()}
    supernet_state = {name: tensor.double() for name, tensor in held.items()}
    (outputs, path_gradients), (supernet_outputs, supernet_gradients) = (
        compute_gradients(alone, alone.full_architecture(), own_state),
        compute_gradients(network, path, supernet_state),
    )
    assert torch.equal(outputs, supernet_outputs)
    assert (
        path_gradients.keys()
        == supernet_gradients.keys()
        == {name for name, _ in build_module(alone, alone.full_architecture()).named_parameters()}
    )
    assert all(torch.equal(path_gradients[name], supernet_gradients[name]) for name in path_gradients)


@pytest.mark.slow
@examples(15)
@given(case=paths())
def test_the_whole_supernet_gives_on_a_path_that_is_drawn_what_the_path_gives_alone(
    case: tuple[Network, Architecture],
) -> None:
    """Equal to the bit (O4): the module of the supernet holds all operators, but runs only the drawn ones."""
    network, path = case
    state = {name: tensor.float() for name, tensor in draw_state(network).items()}
    alone = network_of(specialise_family(network, path))
    whole, own = (
        build_module(network, network.full_architecture()).eval(),
        build_module(alone, alone.full_architecture()).eval(),
    )
    whole.load_state_dict(state)
    own.load_state_dict({name: state[name] for name in own.state_dict()})
    inputs = inputs_of(network.config, 3)
    inputs = inputs if network.symbols else inputs.float()
    draw(whole, {choice: operators[0] for choice, operators in network.operators_of(last_path(network)).items()})
    draw(whole, {choice: operators[0] for choice, operators in network.operators_of(path).items()})
    with torch.inference_mode():
        assert torch.equal(whole(inputs), own(inputs))


def last_path(network: Network) -> Architecture:
    return path_architecture(network, [choice.operators[-1] for choice in network.choices.values()])


@pytest.mark.slow
@examples(15)
@given(case=paths())
def test_a_path_takes_the_multiplications_and_numbers_of_its_module(case: tuple[Network, Architecture]) -> None:
    network, path = case
    alone = network_of(specialise_family(network, path))
    module = build_module(alone, alone.full_architecture()).eval()
    inputs = inputs_of(network.config, 1)
    with FlopCounterMode(display=False) as counter:
        module(inputs if network.symbols else inputs.float())
    recurrent = {"lstm", "gru"} & {operator for _, operators in path.choices for operator in operators}
    cost = estimate_cost(network, path, batch_size=1)
    assert cost.forward_macs == estimate_cost(alone, alone.full_architecture(), batch_size=1).forward_macs
    if not recurrent:  # PyTorch does not count their fused kernels
        assert 2 * cost.forward_macs == counter.get_total_flops()
    assert cost.parameters == sum(tensor.numel() for tensor in module.state_dict().values())
    parts = Costs(network).compute_by_part(network.full_architecture())
    named = ["", *(f"{choice}.{operators[0]}" for choice, operators in path.choices)]
    assert sum(parts[name][0] for name in named) == cost.parameters
    assert sum(parts[name][1] for name in named) == cost.forward_macs


@examples(15)
@given(case=subspaces())
def test_a_subspace_has_the_tensors_of_its_operators_and_always_those_of_no_choice(
    case: tuple[Network, Architecture],
) -> None:
    network, architecture = case
    by_choice = {
        name: dict(architecture.choices).get(name, choice.operators) for name, choice in network.choices.items()
    }
    parts = {f"{name}.{operator}" for name, operators in by_choice.items() for operator in operators}
    assert network.parts_of(architecture) == parts
    assert network.operators_of(architecture) == by_choice
    expected = {name for name, decl in network.tensors.items() if decl.part is None or decl.part in parts}
    assert network.shapes(architecture).keys() == expected
    assert network.parameter_count(architecture) == sum(math.prod(network.tensors[name].shape) for name in expected)
    assert network.is_path(architecture) == all(len(operators) == 1 for operators in by_choice.values())
    cost, least = estimate_cost(network, architecture, batch_size=1), list[int]()
    for seed in range(20):
        rng = random.Random(seed)
        path = path_architecture(network, [rng.choice(operators) for operators in by_choice.values()])
        least.append(estimate_cost(network, path, batch_size=1).forward_macs)
    assert cost.forward_macs <= min(least)  # that of its cheapest path
    assert cost.weight_bytes == 4 * network.parameter_count(architecture)


@pytest.mark.parametrize("config", SUPERNETS, ids=lambda config: f"{config.TYPE} {config.norm}")
def test_every_operator_has_tensors_and_norms_of_its_own(config: Family) -> None:
    network = supernet(config)
    for name, choice in network.choices.items():
        for operator, part in zip(choice.operators, choice.parts, strict=True):
            own = {tensor for tensor, decl in network.tensors.items() if decl.part == part}
            assert all(tensor.startswith(f"{name}.") for tensor in own)
            assert bool(own) == (operator != "identity")


@pytest.mark.parametrize(
    ("operators", "words"),
    [
        ([], "a path has 0 operators, but the network has 3 choices"),
        (["conv1", "conv1", "conv7"], "conv7"),
    ],
)
def test_invalid_paths_are_refused(operators: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        path_architecture(supernet(CNN), operators)


def test_only_a_path_of_a_supernet_is_realised() -> None:
    with pytest.raises(ConfigError, match="but a path has exactly one of each choice"):
        specialise_family(supernet(CNN), supernet(CNN).full_architecture())
    plain = network_of(Mlp(input_shape=(2,), class_count=2, widths=(4,), depths=(1,)))
    with pytest.raises(ConfigError, match="family 'mlp' has no operators to choose from"):
        specialise_family(plain, plain.full_architecture())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operators": (("conv1", "conv9"),)}, "conv9"),
        ({"operators": ((),)}, "operators"),
        ({"operators": (("conv1",), ("conv1",))}, "operators"),
        ({"last_widths": (4, 4)}, "last_widths has 2 items"),
        ({"widths": (4, 7)}, "widths are"),
    ],
)
def test_invalid_settings_of_supernets_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        network_of(replace(CNN, **changes))  # type: ignore[arg-type]


def test_a_block_that_changes_the_width_is_no_identity() -> None:
    with pytest.raises(ConfigError, match="changes the width from 4 to 6, but is the identity"):
        network_of(replace(RNN, operators=(("lstm",), ("lstm",), ("identity",))))
    assert "identity" not in supernet(RNN).choices["section1.block0"].operators
