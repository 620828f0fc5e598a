"""How good paths of a supernet are on the server's validation samples (FedorAS, section 3.2, equation 6)."""

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
from subfleet.rounds.networks import list_living_lineages
from subfleet.rounds.state import RunState, get_memory
from subfleet.rounds.work import ProposedGeneration
from subfleet.tasks import Dataset

__all__ = ["proposed_generation", "random_paths", "score_of", "scored_generation"]

_BATCH_SIZE = 256


def scored_generation(
    context: RunContext, state: RunState, model: ModelState, validation: Dataset | None
) -> ProposedGeneration:
    """The next generation of the method's search, with its scores. It takes seconds to minutes.

    Args:
        context: of the run.
        state: in which it was asked for.
        model: that the search is in.
        validation: samples that nothing else is told by; None where the run has none.

    Raises:
        ConfigError: there are no validation samples, or a path is none of the supernet.
    """
    search, supernet = context.roles.networks.path_search, _supernet_in_use(context, state)
    generation = proposed_generation(context, state)
    if generation is None or search is None or supernet is None:
        return ProposedGeneration(generation=None)
    ticket = secrets.token_hex(4)  # of no consequence but that no two makings share it
    if validation is None and search.federated is not None:
        return ProposedGeneration(generation=generation, ticket=ticket)
    if validation is None:
        raise ConfigError("there are no validation samples to score paths on; set data.validation_samples")
    shared = model.of(supernet.id).shared
    samples = torch.from_numpy(validation.inputs.copy()), torch.from_numpy(validation.labels.copy())
    objective = context.config.training.objective.name
    paths = (path_architecture(supernet, path) for path in generation.paths)
    scores = tuple(score_of(supernet, path, shared, samples, objective=objective) for path in paths)
    return ProposedGeneration(generation=generation, scores=scores, ticket=ticket)


def proposed_generation(context: RunContext, state: RunState) -> Generation | None:
    """The next generation of the method's search; None where nothing is left to search for.

    Then the networks that were found are declared here, as each takes half a second, for which no loop waits.
    """
    search, supernet = context.roles.networks.path_search, _supernet_in_use(context, state)
    if search is None or supernet is None:
        return None
    memory = get_memory(context, state)
    generation = search.propose(memory, supernet, context.config.seed)
    if generation is None:
        for lineage in search.conclude(memory, supernet, state.aggregated_round):
            context.declared(lineage)
    return generation


def _supernet_in_use(context: RunContext, state: RunState) -> Network | None:
    """The network in use that has a choice of operators; None where none has."""
    found = (context.declared(one).network for one in list_living_lineages(context, state))
    return next((one for one in found if one.choices), None)


def random_paths(network: Network, count: int, rng: Random) -> tuple[Architecture, ...]:
    """Paths of a supernet, all equally likely; of a network without choices the whole of it, once."""
    if not network.choices:
        return (network.full_architecture(),)
    drawn = ([rng.choice(one.operators) for one in network.choices.values()] for _ in range(count))
    return tuple(path_architecture(network, path) for path in drawn)


def score_of(
    network: Network,
    path: Architecture,
    state: Mapping[str, Tensor],
    samples: tuple[Tensor, Tensor],
    *,
    objective: Objective = "cross_entropy",
) -> float:
    """How good a path is: its accuracy, or minus its mean loss.

    Running statistics of a supernet are means over all paths, so that those of the path are measured first, on the
    inputs (Guo et al. 2020, section 3.4).

    Args:
        network: the supernet.
        path: of it.
        state: the supernet's tensors by name.
        samples: inputs and labels, as in `evaluate`.
        objective: by which accuracy counts or, where that means nothing or tells less, the loss.
    """
    inputs, labels = samples
    if network.config.norm == "batch":
        state = recalibrate(network, state, path, torch.split(inputs, _BATCH_SIZE))
    found = evaluate(network, path, state, inputs, labels, objective=objective)
    return found.accuracy if found.kind.by_accuracy else -found.loss
