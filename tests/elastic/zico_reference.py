"""The ZiCo score of a submodel from eager gradients, the reference for the scores of devices."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from subfleet.arrays import Arrays
from subfleet.arrays.zico import zico
from subfleet.elastic.building import build_module
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.protocol.submodel import Architecture


def list_scored_tensors(network: Network, architecture: Architecture) -> tuple[str, ...]:
    """The tensors of a submodel that have scored gradients: weights of convolutions and linear layers."""
    return tuple(name for name in network.shapes(architecture) if network.tensors[name].role in ("weight", "residual"))


def zico_score(
    network: Network, architecture: Architecture, state: Mapping[str, Tensor], batches: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """Estimate how well a submodel will learn; see `subfleet.arrays.zico`.

    Score before training, with the state of `build_module(network, network.full_architecture())`: in `init_state` the
    last layer of every block is 0 and hides the layers before it.

    Args:
        network: the declaration.
        architecture: the submodel.
        state: the full model's tensors by name.
        batches: two or more batches of inputs (samples, *input_shape) and of labels: for each row of logits a class, or
            a number below 0 for none.

    Raises:
        ConfigError: the architecture is not a submodel of this network, or the state lacks one of its tensors.
        DataError: there are fewer than two batches, or a gradient is not finite.
    """
    device = next(iter(state.values())).device
    module = build_module(network, architecture).to(device)
    module.load_state_dict(extract(network, architecture, state))
    module.train()
    parameters = dict(module.named_parameters())
    scored = {name: parameters[name] for name in list_scored_tensors(network, architecture)}
    gradients: list[Arrays] = []
    for inputs, labels in batches:
        counted, targets = labels >= 0, labels.to(device)
        loss = cross_entropy(module(inputs.to(device))[counted], targets[counted])
        batch_gradients = torch.autograd.grad(loss, list(scored.values()), materialize_grads=True)
        gradients.append({name: gradient.cpu().numpy() for name, gradient in zip(scored, batch_gradients, strict=True)})
    return zico(gradients)
