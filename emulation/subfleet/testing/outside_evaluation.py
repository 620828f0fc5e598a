"""What a round is evaluated by, looked at from outside: which numbers are in it, and what a plain module makes of them.

A first model has drawn numbers, none of them twice. A number of it that is still there after some rounds was trained
by nobody, wherever a method has put it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from subfleet.aggregation.aggregation import AggregatedModel
from subfleet.aggregation.examining import Examined, Examiner
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
    """What is found from outside of that by which a round was evaluated.

    Attributes:
        accuracy: mean over the networks that the checkpoint holds as the model.
        untrained: the same of the fraction of their numbers that nobody has trained.
    """

    accuracy: float
    untrained: float


def draw_samples(network: Network, count: int = 60) -> Dataset:
    """Samples and labels that are drawn."""
    generator = np.random.default_rng(0)
    config = network.config
    inputs = generator.standard_normal((count, *config.input_shape), dtype=np.float32)
    return Dataset(inputs=inputs, labels=generator.integers(0, config.class_count, count))


def examine(context: RunContext, aggregated: AggregatedModel, samples: Dataset, round_number: int = 1) -> Examined:
    """What the server tells of an aggregated round in which all clients took part."""
    views = Views(context=context, samples=torch.from_numpy(samples.inputs))
    return Examiner(views, samples).examine(aggregated, RunState(), round_number)


def evaluate_outside(
    context: RunContext, first: ModelState, aggregated: AggregatedModel, samples: Dataset
) -> OutsideResult:
    """The same by the round's checkpoint alone, and the clients where each has a model of its own.

    Args:
        context: of a run whose method keeps one network.
        first: the model that it began with.
        aggregated: the model after some rounds.
        samples: labelled ones.
    """
    kept = unpack_state(
        load(save({name: tensor.contiguous() for name, tensor in pack_state(aggregated.state).items()}))
    )
    network, clients = context.network, aggregated.clients
    if not context.roles.aggregator.personal:
        architecture = kept.model or network.full_architecture()
        clients = (Participant(client_id="", architecture=architecture, size=network.size_of(architecture)),)
    found = [_evaluate_client(context, first, kept, client, samples) for client in clients]
    return OutsideResult(
        accuracy=sum(one.accuracy for one in found) / len(found),
        untrained=sum(one.untrained for one in found) / len(found),
    )


def _evaluate_client(
    context: RunContext, first: ModelState, kept: ModelState, client: Participant, samples: Dataset
) -> OutsideResult:
    seen = Views(context=context, samples=torch.from_numpy(samples.inputs)).for_training(kept, client)
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
