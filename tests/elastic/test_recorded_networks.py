"""Any module is recorded as plain data, and replayed at any size."""

import math
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from elastic.recorded_cases import MODULES, Added, Branches, Changed, Exits, Residual
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.maps import extract, overwrite, tensor_maps
from subfleet.elastic.network import Network
from subfleet.elastic.recording.loading import make_module, record_network
from subfleet.elastic.recording.record import NetworkRecord, unpack_record
from subfleet.protocol.submodel import Architecture, Explicit, Prefix

_CUT = 1e-6


def record(name: str) -> tuple[nn.Module, Recorded, Tensor]:
    """A module, its record, and a batch of inputs."""
    make, shape, symbols = MODULES[name]
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(generator.get_state())
        module = make()
    family = record_network(module, shape, symbols=symbols)
    whole = (4, *shape)
    inputs = torch.randint(symbols, whole, generator=generator) if symbols else torch.randn(whole, generator=generator)
    return module, family, inputs


def read(family: Recorded) -> NetworkRecord:
    return unpack_record(family.recording)


def draw_state(module: nn.Module, network: Network) -> dict[str, Tensor]:
    """The module's tensors, with random statistics and biases."""
    generator = torch.Generator().manual_seed(5)
    state = {}
    for name, decl in network.tensors.items():
        tensor = module.state_dict()[name].clone()
        drawn = torch.rand(tensor.shape, generator=generator)
        state[name] = drawn + 0.5 if decl.role == "variance" else tensor + 0.1 * drawn
    return state


def draw_architecture(network: Network, rng: random.Random, *, keep: frozenset[str]) -> Architecture:
    """Any indices of every axis that is not kept, and some blocks."""
    axes = []
    for name, axis in sorted(network.axes.items()):
        if name in keep or axis.kind == "class":
            continue
        groups, step = axis.size // axis.granularity, axis.granularity
        kept = sorted(rng.sample(range(groups), rng.randint(max(1, groups // 3), groups)))
        axes.append((name, Explicit(indices=tuple(group * step + own for group in kept for own in range(step)))))
    return Architecture(axes=tuple(axes), blocks=tuple(block.name for block in network.blocks if rng.random() < 0.6))


def mask(network: Network, architecture: Architecture, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the network with nothing but these blocks, zero at removed indices; variances stay 1."""
    maps = tensor_maps(network, architecture)
    kept = extract(network, Architecture(blocks=architecture.blocks), state)
    return {
        name: overwrite(
            maps[name],
            maps[name].extract(tensor),
            torch.full_like(tensor, float(network.tensors[name].role == "variance")),
        )
        for name, tensor in kept.items()
    }


@pytest.mark.parametrize("name", MODULES)
def test_the_whole_network_computes_the_same_bits(name: str) -> None:
    module, family, inputs = record(name)
    network = network_of(family)
    replayed = build_module(network, network.full_architecture())
    replayed.load_state_dict({own: module.state_dict()[own] for own in network.tensors})
    for training in (False, True):
        expected = module.train(training)(inputs)
        if expected.dim() == 4:  # the classes of pixels come last
            expected = expected.permute(0, 2, 3, 1)
        assert torch.equal(replayed.train(training)(inputs), expected)
    assert all(torch.equal(replayed.state_dict()[own], module.state_dict()[own]) for own in network.tensors)


@pytest.mark.parametrize("name", MODULES)
def test_a_submodel_computes_what_the_masked_network_computes(name: str) -> None:
    module, family, inputs = record(name)
    network, rng = network_of(family), random.Random(1)
    keep = frozenset(axis.name for axis in read(family).axes if axis.mixed)
    state, cut = draw_state(module, network), 0
    for _ in range(8):
        architecture = draw_architecture(network, rng, keep=keep)
        small = build_module(network, architecture)
        small.load_state_dict(extract(network, architecture, state))
        large = build_module(network, Architecture(blocks=architecture.blocks))
        large.load_state_dict(mask(network, architecture, state))
        ours, expected = small.eval()(inputs), large.eval()(inputs)
        assert float((ours - expected).detach().abs().max()) <= _CUT * max(1.0, float(expected.detach().abs().max()))
        cut += network.parameter_count(architecture) < network.parameter_count(network.full_architecture())
    assert cut > 4, "hardly anything was cut"


@pytest.mark.parametrize("name", MODULES)
def test_half_of_every_axis_trains(name: str) -> None:
    _, family, inputs = record(name)
    network = network_of(family)
    axes = tuple(
        (own, Prefix(size=max(1, axis.size // axis.granularity // 2) * axis.granularity))
        for own, axis in sorted(network.axes.items())
        if axis.kind != "class" and axis.size > 1
    )
    architecture = Architecture(axes=axes)
    module = build_module(network, architecture).train()
    module(inputs).square().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    most = 0.7 if name == "parts" else 0.6  # overlapping parts of a layer's outputs cannot be cut
    assert network.parameter_count(architecture) < most * network.parameter_count(network.full_architecture())


def test_blocks_are_layers_that_add_to_their_input() -> None:
    _, family, _ = record("residual")
    assert [block.name for block in network_of(family).blocks] == ["1", "2"]
    assert network_of(family).sections == (("1", "2"),)


def test_a_container_of_one_block_is_not_the_block() -> None:
    family = record_network(nn.Sequential(nn.Linear(3, 4), nn.Sequential(Added(4)), nn.Linear(4, 2)), (3,))
    assert [block.name for block in network_of(family).blocks] == ["1.0"]


def test_a_layer_that_changes_the_sum_is_no_block() -> None:
    family = record_network(nn.Sequential(nn.Linear(3, 3), Changed(3), nn.Linear(3, 2)), (3,))
    assert not network_of(family).blocks


def test_a_layer_that_runs_twice_is_no_block() -> None:
    """As in ALBERT."""
    shared = Added(4)
    family = record_network(nn.Sequential(nn.Linear(3, 4), shared, nn.ReLU(), shared, nn.Linear(4, 2)), (3,))
    network, inputs = network_of(family), torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    assert not network.blocks
    assert build_module(network, Architecture(axes=(("0", Prefix(size=2)),)))(inputs).shape == (3, 2)


def test_attention_has_heads_and_their_width() -> None:
    kinds = {axis.kind: axis.size for axis in network_of(record("branches")[1]).axes.values()}
    assert (kinds["head"], kinds["head_dim"], kinds["class"]) == (3, 4, 5)


def test_it_is_known_what_is_kept_whole_and_why() -> None:
    whole = read(record("attention")[1]).whole
    assert whole["its indices are read one by one"] == ("qkv.weight[0]", "qkv.bias[0]")
    assert whole["the shape of a sample"] == ("embed.weight[1]",)


def test_a_layer_reads_the_outputs_that_are_kept_of_each_layer_before_it() -> None:
    network = network_of(record("dense")[1])
    axes = (("convs.0", Explicit(indices=(1, 3))), ("stem", Explicit(indices=(0, 2, 5))))
    index = extract(
        network,
        Architecture(axes=axes),
        {name: torch.arange(math.prod(decl.shape)).view(decl.shape) for name, decl in network.tensors.items()},
    )
    assert index["norms.1.weight"].tolist() == [0, 2, 5, 7, 9]
    assert index["convs.1.weight"][0, :, 0, 0].tolist() == [0, 18, 45, 63, 81]
    places = [0, 2, 5, 7, 9, *range(10, 18)]
    assert index["head.weight"][0].tolist() == [4 * channel + place for channel in places for place in range(4)]


def test_blocks_are_in_the_order_of_the_network() -> None:
    layers = (layer for _ in range(12) for layer in (nn.ReLU(), Residual(4)))
    family = record_network(nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten(), nn.Linear(16, 2)), (1, 4, 4))
    assert [block.name for block in network_of(family).blocks] == [str(2 + 2 * number) for number in range(12)]


def test_operations_are_those_of_the_layers() -> None:
    _, family, _ = record("residual")
    network = network_of(family)
    cost = estimate_cost(network, network.full_architecture(), batch_size=1)
    stem, plain, grouped = 16 * 8 * 9, 16 * (16 * 8 * 9 + 8 * 16), 16 * (16 * 2 * 9 + 8 * 16)
    assert cost.forward_macs == stem + plain + grouped + 8 * 3


def test_attention_counts_its_products() -> None:
    network = network_of(record("attention")[1])
    cost = estimate_cost(network, network.full_architecture(), batch_size=1)
    assert cost.forward_macs == 7 * 6 * 16 + 8 * 16 * 48 + 2 * 8 * 8 * 16 + 8 * 16 * 16 + 16 * 3


@pytest.mark.parametrize(
    "name",
    [
        "branches",
        "residual",
        "attention",
        "gated",
        "joined",
        "parts",
        "dense",
        "shuffled",
        "tokens",
        "windows",
        "standardised",
        "biased",
        "swapped",
        "tied",
        "compared",
    ],
)
def test_multiplications_are_those_that_pytorch_counts(name: str) -> None:
    module, family, inputs = record(name)
    network = network_of(family)
    # PyTorch does not count its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        module.train()(inputs)
    cost = estimate_cost(network, network.full_architecture(), batch_size=1)
    assert 2 * len(inputs) * cost.forward_macs == counter.get_total_flops()


def test_first_weights_are_like_those_of_the_module() -> None:
    module, family, _ = record("branches")
    state = init_state(network_of(family), 0)
    for name, tensor in state.items():
        own = module.state_dict()[name]
        if float(own.std(correction=0)) == 0:
            assert torch.equal(tensor, own), name
        elif own.numel() > 100:
            assert 0.8 < float(tensor.std() / own.std()) < 1.25, name


def test_logits_are_found_by_name_and_only_what_they_depend_on_is_recorded() -> None:
    module, inputs = Exits(), torch.randn(3, 4)
    family = record_network(module, (4,))
    network = network_of(family)
    assert list(network.tensors) == ["first.weight", "first.bias", "head.weight", "head.bias"]
    assert not any("auxiliary" in call[-1] for call in read(family).training.calls)
    replayed = build_module(network, network.full_architecture())
    replayed.load_state_dict({name: module.state_dict()[name] for name in network.tensors})
    for training in (True, False):
        assert torch.equal(replayed.train(training)(inputs), module.train(training)(inputs)["logits"])


class Averaging(nn.Module):
    """Keeps a mean of its own."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            hidden = hidden - hidden.mean(0)
        else:
            hidden = hidden - self.mean
        logits: Tensor = self.head(torch.relu(hidden))
        return logits


def test_changes_of_buffers_are_recorded() -> None:
    module, inputs = Averaging(), torch.randn(5, 4)
    network = network_of(record_network(module, (4,)))
    replayed = build_module(network, network.full_architecture())
    replayed.load_state_dict(module.state_dict())
    assert torch.equal(replayed.train()(inputs), module.train()(inputs))
    assert float(module.mean.abs().sum()) > 0
    assert torch.equal(replayed.state_dict()["mean"], module.mean)
    assert torch.equal(replayed.eval()(inputs), module.eval()(inputs))


class Repeated(nn.Module):
    """A head that is used for a result as well as for others, with as many as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> dict[str, object]:
        hidden = torch.relu(self.first(inputs))
        others = [self.head(hidden[index : index + 1]) @ torch.ones(3, 3) for index in range(len(hidden))]
        return {"logits": self.head(hidden), "others": others}


def test_what_is_not_recorded_is_not_counted() -> None:
    network = network_of(record_network(Repeated(), (5,)))
    assert estimate_cost(network, network.full_architecture(), batch_size=1).forward_macs == 5 * 8 + 8 * 3


def test_lazy_layers_are_recorded_with_their_sizes() -> None:
    module = nn.Sequential(nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)).train()
    network, inputs = network_of(record_network(module, (3, 4, 4))), torch.randn(3, 3, 4, 4)
    assert network.tensors["3.weight"].shape == (2, 24)
    assert module.training
    replayed = build_module(network, network.full_architecture())
    replayed.load_state_dict({name: module.state_dict()[name] for name in network.tensors})
    assert torch.equal(replayed(inputs), module(inputs))


def test_first_weights_of_lazy_layers_are_recorded_alike() -> None:
    first, second = (record_network(nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), (3, 4)) for _ in range(2))
    assert first == second


class Remembered(nn.Module):
    """Knows which of its results are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.results: list[weakref.ref[Tensor]] = []
        self.alive: list[list[int]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.alive.append([len(result) for ref in self.results if (result := ref()) is not None])
        hidden = inputs + 1
        self.results.append(weakref.ref(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def test_results_of_one_batch_are_held_at_a_time() -> None:
    module = Remembered()
    record_network(module, (4,))
    assert module.alive == [[], [3], [], [5]]


class Windowed(nn.Module):
    """Stores sizes of the batch as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, tokens, _ = inputs.shape
        windows = self.first(inputs).reshape(2 * batch, tokens // 2, 6)
        shifted = windows + torch.zeros(batch).repeat(2)[:, None, None]
        joined = shifted.transpose(0, 1).reshape(tokens // 2, batch, 2, 6).permute(1, 2, 0, 3)
        logits: Tensor = self.head(joined.reshape(batch, tokens, 6))
        return logits


def test_numbers_that_are_multiples_of_the_batch_follow_it() -> None:
    module, inputs = Windowed(), torch.randn(7, 4, 4)
    network = network_of(record_network(module, (4, 4)))
    replayed = build_module(network, network.full_architecture())
    replayed.load_state_dict(module.state_dict())
    assert torch.equal(replayed(inputs), module(inputs))
    assert torch.equal(replayed(inputs[:1]), module(inputs[:1]))


def test_recording_leaves_the_module_as_it_was() -> None:
    module, random_state = Branches().eval(), torch.random.get_rng_state()
    module.stem.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    modes = [layer.training for layer in module.modules()]
    record_network(module, (2, 6, 6))
    assert [layer.training for layer in module.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random_state)


@pytest.mark.slow
def test_a_record_is_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    here = "".join(record_network(make_module("mine:build", {}), (4,)).recording)
    program = (
        "from subfleet.elastic.recording.loading import make_module, record_network\n"
        "print(''.join(record_network(make_module('mine:build', {}), (4,)).recording))\n"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert elsewhere == f"{here}\n"
