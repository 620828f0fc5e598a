"""Indices are sorted by what they contribute for given samples."""

import torch
from torch import Tensor, nn

from subfleet.elastic.activations import rank_by_activations
from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.elastic.permuting import permute, rank_indices
from subfleet.elastic.recording.loading import record_network
from subfleet.protocol.submodel import Architecture, Prefix


class Joined(nn.Module):
    """Two branches one after another, which a linear layer reads twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 6, 3), nn.Conv2d(1, 4, 3)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.hidden = nn.Linear(10 * 36, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        left = self.depthwise(self.left(images).relu()).relu()
        hidden = self.hidden(torch.cat([left, self.right(images).relu()], 1).flatten(1)).relu()
        logits: Tensor = self.head(hidden) + self.head(hidden * 2)
        return logits


def draw() -> tuple[Joined, Network, dict[str, Tensor], Tensor]:
    """A network in which some channels are 0 for images, although their weights are large."""
    generator = torch.Generator().manual_seed(0)
    module = Joined()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0, 0.1, generator=generator)  # so that whatever lives computes something
        for layer, dead in ((module.depthwise, [0, 2, 5]), (module.right, [1, 2])):
            layer.weight[dead] *= 5
            assert layer.bias is not None
            layer.bias[dead] = -1000.0
        module.hidden.bias[:4] = -1000.0
    network = network_of(record_network(module, (1, 8, 8)))
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return module, network, state, torch.rand(16, 1, 8, 8, generator=generator)


def predict(network: Network, architecture: Architecture, state: dict[str, Tensor], images: Tensor) -> Tensor:
    small = build_module(network, architecture).eval()
    small.load_state_dict(extract(network, architecture, state))
    with torch.no_grad():
        logits: Tensor = small(images)
    return logits


def test_what_computes_nothing_for_the_samples_comes_last() -> None:
    module, network, state, images = draw()
    ranked = rank_by_activations(network, state, images)
    assert set(ranked["left"][3:]) == {0, 2, 5}
    assert set(ranked["right"][2:]) == {1, 2}
    assert set(ranked["hidden"][4:]) == {0, 1, 2, 3}
    half = Architecture(axes=(("hidden", Prefix(size=4)), ("left", Prefix(size=3)), ("right", Prefix(size=2))))
    expected = module.eval()(images).detach()
    torch.testing.assert_close(predict(network, half, permute(network, state, ranked), images), expected)
    by_weights = permute(network, state, rank_indices(network, state, power=1))
    assert (predict(network, half, by_weights, images) - expected).abs().max() > 0.01


def test_a_contribution_is_the_mean_size_of_inputs_times_the_sizes_of_weights() -> None:
    module, network, state, images = draw()
    with torch.no_grad():
        left = module.depthwise(module.left(images).relu()).relu()
        joined = torch.cat([left, module.right(images).relu()], 1).flatten(1)
        hidden = module.hidden(joined).relu()
    read = joined.mean(0) * module.hidden.weight.detach().abs().sum(0)
    channels = read.reshape(10, 36).sum(1)
    expected = {
        "left": channels[:6],
        "right": channels[6:],
        "hidden": 3 * hidden.mean(0) * module.head.weight.detach().abs().sum(0),
    }
    ranked = rank_by_activations(network, state, images)
    for axis, contributions in expected.items():
        assert list(ranked[axis]) == contributions.sort(descending=True, stable=True).indices.tolist()
    assert ranked.keys() == expected.keys(), "classes keep their order"
