"""Scores of a supernet's paths on the server's validation samples (FedorAS, section 3.2, equation 6)."""

import secrets
from collections.abc import Mapping
from random import Random

import torch
from torch import Tensor

from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import recalibrate
from subfleet.elastic.supernets import path_architecture
from subfleet.methods.run_networks import Generation
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task_kinds import Objective
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import find_supernet
from subfleet.rounds.state import RunState, get_memory
from subfleet.rounds.work import ProposedGeneration
from subfleet.tasks import Dataset

_BATCH_SIZE = 256


def score_generation(
    context: RunContext, state: RunState, model: ModelState, validation: Dataset | None
) -> ProposedGeneration:
    """Propose the next generation of the method's search and score it. It takes seconds to minutes.

    Args:
        context: of the run.
        state: of the run at the request.
        model: with the supernet.
        validation: samples for this purpose alone; None if the run has none.

    Raises:
        ConfigError: there are no validation samples, or a path does not belong to the supernet.
    """
    search, supernet = context.roles.networks.path_search, find_supernet(context, state)
    generation = propose_generation(context, state)
    if generation is None or search is None or supernet is None:
        return ProposedGeneration(generation=None)
    ticket = secrets.token_hex(4)  # only to tell proposals apart
    if validation is None and search.federated is not None:
        return ProposedGeneration(generation=generation, ticket=ticket)
    if validation is None:
        raise ConfigError("there are no validation samples to score paths on; set data.validation_samples")
    shared = model.of(supernet.id).shared
    samples = torch.from_numpy(validation.inputs.copy()), torch.from_numpy(validation.labels.copy())
    objective = context.config.training.objective.name
    paths = (path_architecture(supernet, path) for path in generation.paths)
    scores = tuple(score_path(supernet, path, shared, samples, objective=objective) for path in paths)
    return ProposedGeneration(generation=generation, scores=scores, ticket=ticket)


def propose_generation(context: RunContext, state: RunState) -> Generation | None:
    """Propose the next generation of the method's search; None if the search is complete.

    In that case the resulting networks are declared here, as each takes half a second, too long for the loop.
    """
    search, supernet = context.roles.networks.path_search, find_supernet(context, state)
    if search is None or supernet is None:
        return None
    memory = get_memory(context, state)
    generation = search.propose(memory, supernet, context.config.seed)
    if generation is None:
        for lineage in search.conclude(memory, supernet, state.aggregated_round):
            context.get_declared(lineage)
    return generation


def draw_random_paths(network: Network, count: int, rng: Random) -> tuple[Architecture, ...]:
    """Random paths of a supernet, all equally likely; of a network without choices, the whole network once."""
    if not network.choices:
        return (network.full_architecture(),)
    drawn = ([rng.choice(choice.operators) for choice in network.choices.values()] for _ in range(count))
    return tuple(path_architecture(network, path) for path in drawn)


def score_path(
    network: Network,
    path: Architecture,
    state: Mapping[str, Tensor],
    samples: tuple[Tensor, Tensor],
    *,
    objective: Objective = "cross_entropy",
) -> float:
    """The score of a path: its accuracy, or minus its mean loss.

    Running statistics of a supernet are means over all paths, so those of the path are first measured on the inputs
    (Guo et al. 2020, section 3.4).

    Args:
        network: the supernet.
        path: of it.
        state: the supernet's tensors by name.
        samples: inputs and labels, as in `evaluate`.
        objective: decides whether accuracy or the loss counts.
    """
    inputs, labels = samples
    if network.config.norm == "batch":
        state = recalibrate(network, state, path, torch.split(inputs, _BATCH_SIZE))
    evaluation = evaluate(network, path, state, inputs, labels, objective=objective)
    return evaluation.accuracy if evaluation.kind.by_accuracy else -evaluation.loss
