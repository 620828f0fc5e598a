"""Evaluates a round independently of the server: by its checkpoint and a plain module.

All numbers of a first model are drawn and different. A number that is still in the model after some rounds is
untrained, wherever a method has moved it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from subfleet.aggregation.aggregation import AggregatedModel
from subfleet.aggregation.round_aggregator import Examined, Examiner
from subfleet.aggregation.views import Views
from subfleet.elastic.building import build_module
from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import ModelState, pack_state, unpack_state
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Participant
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import RunState
from subfleet.tasks import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideResult:
    """The result of an independent evaluation.

    Attributes:
        accuracy: mean over the evaluated models.
        untrained: mean fraction of numbers that no client has trained.
    """

    accuracy: float
    untrained: float


def draw_samples(network: Network, count: int = 60) -> Dataset:
    """Draw samples and labels."""
    generator = np.random.default_rng(0)
    config = network.config
    inputs = generator.standard_normal((count, *config.input_shape), dtype=np.float32)
    return Dataset(inputs=inputs, labels=generator.integers(0, config.class_count, count))


def examine(context: RunContext, aggregated: AggregatedModel, samples: Dataset, round_number: int = 1) -> Examined:
    """The server's evaluation of an aggregated round in which all clients took part."""
    views = Views(context=context, samples=torch.from_numpy(samples.inputs))
    return Examiner(views, samples).examine(aggregated, RunState(), round_number)


def evaluate_outside(
    context: RunContext, first: ModelState, aggregated: AggregatedModel, samples: Dataset
) -> OutsideResult:
    """Evaluate a round by its checkpoint; with personalised models, the mean over its clients.

    Args:
        context: of a run with a method that has one network.
        first: the model before the first round.
        aggregated: the model after some rounds.
        samples: with labels.
    """
    stored = unpack_state(
        load(save({name: tensor.contiguous() for name, tensor in pack_state(aggregated.state).items()}))
    )
    network, clients = context.network, aggregated.clients
    if not context.roles.aggregator.personal:
        architecture = stored.model or network.full_architecture()
        clients = (Participant(client_id="", architecture=architecture, size=network.size_of(architecture)),)
    results = [_evaluate_client(context, first, stored, client, samples) for client in clients]
    return OutsideResult(
        accuracy=sum(result.accuracy for result in results) / len(results),
        untrained=sum(result.untrained for result in results) / len(results),
    )


def _evaluate_client(
    context: RunContext, first: ModelState, stored: ModelState, client: Participant, samples: Dataset
) -> OutsideResult:
    seen = Views(context=context, samples=torch.from_numpy(samples.inputs)).of(stored, client).tensors
    own = extract(context.network, client.architecture, seen)
    old = sum(int(torch.isin(tensor, first.shared[name]).sum()) for name, tensor in own.items())
    return OutsideResult(
        accuracy=_measure_accuracy(context.network, client.architecture, own, samples),
        untrained=old / sum(tensor.numel() for tensor in own.values()),
    )


def _measure_accuracy(
    network: Network, architecture: Architecture, own: Mapping[str, Tensor], samples: Dataset
) -> float:
    module = build_module(network, architecture)
    module.load_state_dict(dict(own))
    with torch.no_grad():
        predicted = module.eval()(torch.from_numpy(samples.inputs)).argmax(dim=-1)
    return float((predicted == torch.from_numpy(samples.labels)).double().mean())
