"""Parts of a module that training leaves as they are, adapters, and the order of given weights."""

import math

import pytest
import torch
from torch import Tensor, nn

from subfleet.arrays.codecs import count_encoded_bytes
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.growing import resize
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.elastic.permuting import permute, rank_indices
from subfleet.elastic.recording.adapters import add_adapters, merge_adapters
from subfleet.elastic.recording.freezing import freeze_parameters
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.recording.tuning import LoraSettings
from subfleet.elastic.unions import unite_families
from subfleet.elastic.update_form import UpdateForm, list_frozen
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.protocol.update_codecs import Uncompressed


class Positions(nn.Module):
    """Adds a table of sines to a stream, as PyTorch's tutorial on transformers does, and normalises its inputs."""

    def __init__(self, width: int = 8, tokens: int = 5) -> None:
        super().__init__()
        angles = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(width) / width)
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(tokens)
        self.register_buffer("table", torch.sin(angles)[None])

    def forward(self, sequence: Tensor) -> Tensor:
        stream = self.norm(self.embed(sequence)) + self.table
        logits: Tensor = self.head(torch.relu(stream).mean(1))
        return logits


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5)),
        nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def record(module: nn.Module, *shape: int) -> tuple[Recorded, Network]:
    family = record_network(module, shape)
    return family, network_of(family)


def test_a_constant_buffer_keeps_its_values_in_every_submodel() -> None:
    module = Positions()
    _, network = record(module, 5, 3)
    assert list_frozen(network) == {"table"}
    assert network.axes["embed"].size == 8, "its width can be cut all the same"
    state = init_state(network, 1)
    assert torch.equal(state["table"], module.state_dict()["table"])
    assert not torch.equal(state["embed.weight"], module.state_dict()["embed.weight"])
    narrow = Architecture(axes=(("embed", Prefix(size=3)),))
    assert torch.equal(extract(network, narrow, state)["table"], module.state_dict()["table"][..., :3])
    assert build_module(network, narrow)(torch.randn(2, 5, 3)).shape == (2, 2)


def test_a_network_with_constants_is_not_resized() -> None:
    family, _ = record(Positions(), 5, 3)
    assert family.hindrance == "has no residual blocks"
    with pytest.raises(ConfigError, match=r"tensor 'table' keeps the values .* so its size \(1, 5, 8\) cannot change"):
        resize(network_of(family), {"embed": 12})
    with pytest.raises(ConfigError, match="tensor 'table' keeps the values"):
        unite_families([family, record_network(Positions(12), (5, 3))])


def test_running_statistics_are_not_constant() -> None:
    _, network = record(Positions(), 5, 3)
    assert not network.tensors["norm.running_mean"].frozen


@pytest.mark.parametrize("pattern", ["0", "0.*", "0.?.*"])
def test_a_frozen_part_is_neither_trained_nor_sent(pattern: str) -> None:
    module = layers()
    freeze_parameters(module, [pattern])
    family, network = record(module, 1, 6, 6)
    frozen = {name for name in network.tensors if name.startswith("0.")}
    assert list_frozen(network) == frozen == {*family.frozen}
    assert {"0.1.running_mean", "0.1.running_var"} <= frozen, "statistics of a frozen norm"
    sent = UpdateForm.of(network, network.full_architecture(), Uncompressed())
    assert sent.shapes.keys() == network.tensors.keys() - frozen
    assert sent.size_bytes == sum(count_encoded_bytes(Uncompressed(), math.prod(own)) for own in sent.shapes.values())
    replayed = build_module(network, network.full_architecture()).train()
    replayed.load_state_dict({name: module.state_dict()[name] for name in network.tensors})
    before = {name: tensor.clone() for name, tensor in replayed.state_dict().items()}
    optimiser = torch.optim.SGD([own for own in replayed.parameters() if own.requires_grad], 0.1)
    replayed(torch.randn(4, 1, 6, 6)).square().sum().backward()
    optimiser.step()
    changed = {name for name, tensor in replayed.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == network.tensors.keys() - frozen


def test_a_frozen_norm_uses_its_statistics_in_training() -> None:
    """As the module does if its user sets this layer to evaluation."""
    module = layers()
    freeze_parameters(module, ["0.1"])
    _, network = record(module, 1, 6, 6)
    replayed = build_module(network, network.full_architecture()).train()
    replayed.load_state_dict({name: module.state_dict()[name] for name in network.tensors})
    module.train()[0][1].eval()  # type: ignore[index]
    images = torch.randn(4, 1, 6, 6)
    results = []
    for own in (replayed, module):
        with torch.random.fork_rng():
            torch.random.set_rng_state(torch.Generator().manual_seed(1).get_state())
            results.append(own(images))
    assert torch.equal(*results)


def test_a_large_frozen_tensor_waits_for_its_values() -> None:
    module = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))
    freeze_parameters(module, ["0"])
    family, _ = record(module, 300)
    assert family.awaited == ("0.weight",)
    assert family.hindrance == "has no residual blocks"


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["0", "4.*"], r"freeze names '4\.\*', but the network has the layers \['0', '1', '3'\]; name some of these"),
        (["*"], r"freeze names \['\*'\], which leave nothing to train"),
    ],
)
def test_a_wrong_pattern_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        freeze_parameters(layers(), patterns)


def adapted() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3))
    add_adapters(module, LoraSettings(rank=4, targets=("0", "2"), train=("4",)))
    return module


def test_an_adapted_module_trains_its_adapters_alone() -> None:
    module = adapted()
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3))
    plain.load_state_dict({name: own for name, own in module.state_dict().items() if "lora" not in name})
    inputs = torch.randn(5, 6)
    assert torch.equal(module(inputs), plain(inputs)), "at first it computes the same"
    _, network = record(module, 6)
    trained = {"0.lora_down", "0.lora_up", "2.lora_down", "2.lora_up", "4.weight", "4.bias"}
    assert network.tensors.keys() - list_frozen(network) == trained
    ranks = [axis for axis in network.axes.values() if axis.size == 4]
    assert len(ranks) == 2, "each rank is an axis"
    state = init_state(network, 3)
    assert not state["0.lora_up"].any()
    assert float(state["0.lora_down"].std()) == pytest.approx(1 / math.sqrt(6), rel=0.5)
    submodel = Architecture(axes=tuple(sorted((axis.name, Prefix(size=2)) for axis in ranks)))
    assert extract(network, submodel, state)["2.lora_up"].shape == (10, 2)


def test_merged_adapters_compute_the_same_without_them() -> None:
    module = adapted().double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape))
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    plain.load_state_dict(merge_adapters(module.state_dict()))
    inputs = torch.randn(5, 6).double()
    torch.testing.assert_close(plain(inputs), module(inputs), rtol=1e-12, atol=1e-12)


def test_a_target_that_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"lora.targets names '1', but the network has the linear layers \['0', '2'\]"
    ):
        add_adapters(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), LoraSettings(targets=("1",)))


def test_a_narrow_submodel_of_sorted_weights_keeps_what_matters() -> None:
    """Half of the channels are nothing but noise: sorted, the half submodel computes nearly what the whole does."""
    with torch.random.fork_rng():
        torch.random.set_rng_state(torch.Generator().manual_seed(1).get_state())
        module = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
        )
        images = torch.randn(6, 1, 6, 6)
    _, network = record(module, 1, 6, 6)
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        state[name][::2] *= 1e-3
    ordered = permute(network, state, rank_indices(network, state, power=1))
    whole, half = network.full_architecture(), Architecture(axes=(("0", Prefix(size=4)), ("2", Prefix(size=4))))
    differences = []
    for own in (state, ordered):
        results = []
        for architecture in (whole, half):
            built = build_module(network, architecture)
            built.load_state_dict(extract(network, architecture, own))
            results.append(built(images).detach())
        differences.append(float((results[0] - results[1]).norm() / results[0].norm()))
    assert differences[1] < 0.02
    assert differences[0] > 0.2
    module.load_state_dict(ordered)
    torch.testing.assert_close(module(images), build_whole(network, state)(images))


def build_whole(network: Network, state: dict[str, Tensor]) -> nn.Module:
    built = build_module(network, network.full_architecture())
    built.load_state_dict(state)
    return built
