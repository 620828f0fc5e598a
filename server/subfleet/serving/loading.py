"""Loads the model and the result of a run from its state and its journal."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load

from subfleet.aggregation.checkpoint import checkpoint_path, load_checkpoint
from subfleet.elastic.activations import rank_by_activations
from subfleet.elastic.building import init_state
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.inheriting import inherit
from subfleet.elastic.model_state import ModelState, unpack_state
from subfleet.elastic.network import Network
from subfleet.elastic.permuting import permute, rank_indices
from subfleet.elastic.recording.adapters import DOWN, UP
from subfleet.journal.base import RunJournal
from subfleet.journal.records import RunResult
from subfleet.journal.rows import build_network_records, list_deployed_models
from subfleet.journal.totals import describe_outliers
from subfleet.methods.describing import describe_status
from subfleet.protocol.errors import ConfigError, FileError, explain_os_errors
from subfleet.rounds.closing import explain_early_end
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import list_first_attempts, list_lineages
from subfleet.rounds.searching import find_searched_round
from subfleet.rounds.state import RunState
from subfleet.settings.sections import FirstWeights
from subfleet.tasks import Dataset

_MOST_SAMPLES = 256
"""Samples by which weights are sorted."""
_ADAPTERS = (f".{DOWN}", f".{UP}")
"""Ends of the names of tensors that the saved state of a module lacks."""


def load_model(
    context: RunContext, state: RunState, journal: RunJournal, checkpoints: Path, samples: Dataset
) -> ModelState:
    """The model from which the next round starts.

    Args:
        context: of the run.
        state: of the run.
        journal: of the run.
        checkpoints: folder of the models after its rounds.
        samples: the server's, by which given weights may be sorted.

    Raises:
        FileError: the checkpoint is missing, or the file of the first weights is missing or has changed.
        ConfigError: the first weights belong to another network.
    """
    if state.aggregated_round == 0:
        return _load_first_model(context, state, samples)
    sha256 = journal.checkpoint_sha256(state.aggregated_round)
    if sha256 is None:
        raise FileError(f"the journal has no checkpoint of round {state.aggregated_round}; restore the state folder")
    stored = unpack_state(load_checkpoint(checkpoints, state.aggregated_round, sha256))
    ordered = stored.reorder(lambda lineage: context.get_declared(lineage).network.tensors)
    return _add_networks(context, state, ordered)


def _add_networks(context: RunContext, state: RunState, model: ModelState) -> ModelState:
    """The model with the networks found by a search since the last checkpoint, from which they are derived."""
    stored = set(model.network_ids)
    for lineage in state.lineages:
        if lineage.living and lineage.id not in stored:
            parent = model.of(lineage.parent or "")
            network, of = context.get_declared(lineage).network, context.get_declared(parent.lineage).network
            weights = inherit(lineage.map, network, of, parent.shared, seed=context.config.seed)
            model = model.with_network(lineage.id, ModelState.first(weights, lineage))
    for lineage in state.lineages:
        if not lineage.living and lineage.id in model.network_ids:
            model = model.without_network(lineage.id, lineage)
    return model


def _load_first_model(context: RunContext, state: RunState, samples: Dataset) -> ModelState:
    """The first weights of every network that is in use before the first round."""
    seed, given = context.config.seed, context.config.first_weights
    first, *others = list_lineages(context, state.lineages)
    if not first.living:
        model = ModelState(shared={})
    elif given is None:
        model = ModelState.first(init_state(context.network, seed))
    else:
        model = _read_first_weights(given, context.network, seed, samples)
    for lineage in others:
        drawn = init_state(context.get_declared(lineage).network, seed)
        model = model.with_network(lineage.id, ModelState.first(drawn, lineage))
    return model if first.living else model.without_network(first.id, first)


def _read_first_weights(given: FirstWeights, network: Network, seed: int, samples: Dataset) -> ModelState:
    """The given first weights, with tensors in the order of the network."""
    with explain_os_errors(f"first weights {given.file} cannot be read", "restore that file"):
        content = Path(given.file).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != given.sha256:
        raise FileError(
            f"first weights {given.file} have the SHA-256 {sha256}, but must have {given.sha256}; restore that file, "
            "or begin another run"
        )
    stored = unpack_state(load(content)).of(given.network)
    weights = stored.shared
    if isinstance(network.config, Recorded):  # the saved state of a module also has counters and unused layers
        drawn = {name: own for name, own in init_state(network, seed).items() if name.endswith(_ADAPTERS)}
        weights = {**drawn, **{name: own for name, own in weights.items() if name in network.tensors}}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != {name: decl.shape for name, decl in network.tensors.items()}:
        raise ConfigError(
            f"first weights {given.file} do not fit the run's model; set model to the network they are of"
        )
    shared = {name: weights[name] for name in network.tensors}
    if given.order == "importance":
        shared = permute(network, shared, rank_indices(network, shared, power=1))
    elif given.order == "activations":
        inputs = torch.from_numpy(samples.inputs[:_MOST_SAMPLES].copy())
        shared = permute(network, shared, rank_by_activations(network, shared, inputs))
    return ModelState(shared=shared, untrained=stored.untrained)


def build_result(context: RunContext, state: RunState, journal: RunJournal, checkpoints: Path) -> RunResult:
    """The result of a run in its current state; `checkpoints` is the folder of the models after its rounds."""
    records, evaluations = journal.records(), journal.evaluations()
    searched = find_searched_round(context, state)
    return RunResult(
        run_id=context.run_id,
        method=context.config.method.TYPE,
        method_status=describe_status(
            context.config.method, context.config.setting, describe_outliers(records, reported=False)
        ),
        finished=state.phase == "finished",
        accuracy=records[-1].accuracy if records else None,
        rounds=records,
        deployed=list_deployed_models(client for _, client in sorted(state.clients.items())),
        model_path=checkpoint_path(checkpoints, state.aggregated_round) if state.aggregated_round else None,
        supernet_path=checkpoint_path(checkpoints, searched) if searched else None,
        networks=build_network_records(context, state, records, evaluations),
        evaluations=evaluations,
        generations=journal.generations(),
        ended_early=explain_early_end(context, state),
        programs_from=list_first_attempts(context, state),
    )
