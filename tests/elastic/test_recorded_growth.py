"""Recorded networks grow cell by cell and compute the same: FedTrans' invariants T1 and T7 for modules of any code."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import pytest
import torch
from elastic.recorded_cases import Added, Changed, Dense, Residual
from elastic.test_cells import Morph, check_changes, check_found_changes, check_outputs, morphs, outputs, weights_of
from elastic.test_growing import inputs_of
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from torch import Tensor, nn

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.growing import can_deepen, deepen_cell, derive_settings, resize, widen_cells
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.replication import Replication, size_in
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Prefix


class InPlace(nn.Module):
    """Changes its input in place, after a ReLU of it would change what it adds to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs += self.last(torch.relu_(self.first(inputs)))
        return inputs


class Scaled(nn.Module):
    """Adds two paths at once, each scaled or normalised, and ends with a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.other, self.scale = nn.Linear(width, width), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.norm(self.back(nn.functional.gelu(self.wide(inputs))))
        return torch.relu(inputs + (first + self.scale * torch.sigmoid(self.other(inputs))))


class Normed(nn.Module):
    """Adds layers with a norm between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 6), nn.LayerNorm(6), nn.Linear(6, width))

    def forward(self, inputs: Tensor) -> Tensor:
        added: Tensor = self.layers(inputs)
        return inputs + added


def _layers(*blocks: nn.Module, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Sequential(*blocks), nn.Linear(width, 3))


MODULES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType(
    {
        "convolutions": (
            lambda: nn.Sequential(
                nn.Conv2d(1, 8, 3), Residual(8), Residual(8, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(8, 3),
            ),
            (1, 6, 6),
        ),
        "layers": (lambda: _layers(Scaled(8), Scaled(8)), (6,)),
        "norms inside": (lambda: _layers(Normed(8), Added(8)), (6,)),
        "in place": (lambda: _layers(InPlace(8), Added(8), InPlace(8)), (6,)),
        "attention": (lambda: _encode(norm_first=True), (5, 6)),
        "norms after sums": (lambda: _encode(norm_first=False), (5, 6)),
    }
)  # fmt: skip


def _encode(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(6, 12), encoder, nn.Flatten(), nn.Linear(60, 3))


@cache
def record(name: str) -> Recorded:
    make, shape = MODULES[name]
    with torch.random.fork_rng():
        torch.random.set_rng_state(torch.Generator().manual_seed(3).get_state())
        return record_network(make(), shape)


RECORDED = st.deferred(lambda: morphs([record(name) for name in MODULES]))
"""A recorded network, with up to three cells widened or deepened in turn."""


@pytest.mark.slow
@examples(40)
@given(RECORDED, st.booleans())
def test_a_grown_network_keeps_its_outputs(morph: Morph, shares: bool) -> None:
    check_outputs(morph, shares=shares)


@pytest.mark.slow
@examples(40)
@given(RECORDED)
def test_a_grown_network_costs_more_and_nothing_else_changes(morph: Morph) -> None:
    check_changes(morph)
    check_found_changes(morph)


@pytest.mark.parametrize("name", MODULES)
def test_a_cell_becomes_wider_inside(name: str) -> None:
    network = network_of(record(name))
    assert len(network.cells) >= 2
    for cell in network.cells:
        for axis in cell.axes:
            assert network.axes[axis].kind != "class"
            assert {decl.part for decl in network.tensors.values() if axis in network.list_axes(decl)} == {cell.name}
        if cell.axes:
            wider = network_of(widen_cells(network.config, [cell.name], 1.5))
            check_outputs(Morph(before=network, after=wider, wider=(cell.name,), followed=()), shares=False)


def test_a_sum_that_is_normalised_is_no_identity() -> None:
    """Such a block can be left out and widened, but not repeated."""
    network = network_of(record("norms after sums"))
    assert [cell.name for cell in network.cells] == ["1.layers.0", "1.layers.1"]
    assert all(cell.axes for cell in network.cells)
    assert not any(can_deepen(network, cell) for cell in network.cells)


def test_new_blocks_have_the_next_numbers_of_their_container() -> None:
    network = network_of(record("convolutions"))
    first, second = network.cells
    assert (first.name, second.name) == ("1", "2")
    config = deepen_cell(network.config, first, 2)
    assert [cell.name for cell in network_of(config).cells] == ["1", "6", "7", "2"]
    names = list(network_of(deepen_cell(config, second)).tensors)
    assert [name for name in names if name.endswith("last.weight")] == [f"{own}.last.weight" for own in (1, 6, 7, 2, 8)]


def test_a_submodel_of_a_grown_network_lacks_the_new_block() -> None:
    """What it computes is what the network computed before it grew."""
    before = network_of(record("in place"))
    after = network_of(deepen_cell(before.config, before.cells[0]))
    state = weights_of(after)
    smaller = build_module(after, size_in(after, before)).double().eval()
    own = {name: state[name] for name in before.tensors}
    smaller.load_state_dict(own)
    assert torch.equal(smaller(inputs_of(before).double()), outputs(before, own, training=False))


def test_a_narrow_network_of_its_own_starts_as_strongly_as_the_whole() -> None:
    """The weights of a layer with a quarter of the inputs are drawn twice as large."""
    network = network_of(record_network(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)), (64,)))
    size = Architecture(axes=(("0", Prefix(size=32)),), name="narrow")
    narrow = network_of(derive_settings(network, size))
    deviations = [float(init_state(own, 1)["2.weight"].std()) for own in (network, narrow)]
    assert deviations[1] == pytest.approx(2 * deviations[0], rel=0.1)
    assert network.shapes(size) == {name: decl.shape for name, decl in narrow.tensors.items()}


class Gate(nn.Module):
    """Adds what is 0 for no known tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        added: Tensor = self.layer(inputs)
        return inputs + torch.cos(added)


class Changing(nn.Module):
    """Adds to its input, which it changes before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        added: Tensor = self.layer(torch.sigmoid_(inputs))
        return inputs + added


@pytest.mark.parametrize("block", [Gate, Changing])
def test_a_block_that_cannot_be_the_identity_is_not_repeated(block: Callable[[int], nn.Module]) -> None:
    network = network_of(record_network(_layers(block(8), Added(8)), (6,)))
    deepened = {cell.name: can_deepen(network, cell) for cell in network.cells}
    assert deepened == {"2.0": False, "2.1": True}


class Squared(nn.Module):
    """Adds a product that reads the rows of a matrix, and has the same axis in both dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(8, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.relu(inputs @ self.matrix)


def test_indices_that_are_combined_or_read_unusually_are_not_copied() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.first = nn.Embedding(9, 8), nn.Linear(8, 10)
            self.matrix = nn.Parameter(torch.randn(10, 8))
            self.normed = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8))

        def forward(self, tokens: Tensor) -> Tensor:
            stream = self.embed(tokens)
            stream = stream + torch.relu(self.first(stream)) @ self.matrix
            stream = stream + self.normed(stream)
            logits: Tensor = stream @ self.embed.weight.T
            return logits

    network = network_of(record_network(Unusual(), (5,), symbols=9))
    assert {name: (axis.copied, axis.evenly) for name, axis in network.axes.items() if axis.kind != "class"} == {
        "matrix": (False, False), "normed.0": (True, True), "normed.2": (False, False),
    }  # fmt: skip
    (axis,) = (own for own in network_of(record_network(_layers(Squared()), (6,))).axes.values() if own.kind != "class")
    assert not axis.copied
    wider = network_of(resize(network, {"matrix": 20}))
    with pytest.raises(ConfigError, match="axis 'matrix' cannot be copied, because its indices are combined"):
        Replication.cycle(wider, size_in(wider, network))


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (lambda: _layers(Changed(8)), (6,), "has no residual blocks"),
        (
            lambda: nn.Sequential(Dense(), nn.Linear(3, 8), Added(8)),
            (2, 4, 4),
            "reads several outputs one after another, which cannot grow by copies",
        ),
    ],
)
def test_what_cannot_grow_says_why(module: Callable[[], nn.Module], shape: tuple[int, ...], reason: str) -> None:
    assert record_network(module(), shape).hindrance == reason
