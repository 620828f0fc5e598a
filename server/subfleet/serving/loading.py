"""Where a run stands, by its state and its journal: its model, and its result so far."""

import hashlib
from pathlib import Path

from safetensors.torch import load

from subfleet.elastic.building import init_state
from subfleet.elastic.inheriting import inherited
from subfleet.elastic.model_state import ModelState, unpacked
from subfleet.elastic.network import Network
from subfleet.folding.checkpoint import checkpoint_path, load_checkpoint
from subfleet.journal.journal import Journal
from subfleet.journal.lineages import network_records
from subfleet.journal.outliers import counted_outliers
from subfleet.journal.records import RunResult
from subfleet.journal.rows import deployed_models
from subfleet.methods.describing import method_status
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.rounds.continuing import why_early
from subfleet.rounds.networks import all_lineages, counting_turns
from subfleet.rounds.searching import searched_round
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms
from subfleet.settings.first_model import FirstWeights

__all__ = ["loaded_model", "standing_result"]


def loaded_model(terms: Terms, state: RunState, journal: Journal, checkpoints: Path) -> ModelState:
    """The model from which the next round starts.

    Raises:
        FileError: its checkpoint is lost, or the file of its first weights is, or was changed.
        ConfigError: its first weights are those of another network.
    """
    if state.folded_round == 0:
        return _first_model(terms, state)
    sha256 = journal.checkpoint_sha256(state.folded_round)
    if sha256 is None:
        raise FileError(f"the journal has no checkpoint of round {state.folded_round}; restore the state folder")
    stored = unpacked(load_checkpoint(checkpoints, state.folded_round, sha256))
    ordered = stored.ordered(lambda lineage: terms.declared(lineage).network.tensors)
    return _with_found(terms, state, ordered)


def _with_found(terms: Terms, state: RunState, model: ModelState) -> ModelState:
    """The model with the networks that a search after the last fold has found, which its checkpoint knows nothing of.

    They follow from it, so that nothing is written down twice.
    """
    stored = set(model.network_ids)
    for lineage in state.lineages:
        if lineage.living and lineage.id not in stored:
            parent = model.of(lineage.parent or "")
            network, of = terms.declared(lineage).network, terms.declared(parent.lineage).network
            weights = inherited(lineage.map, network, of, parent.shared, seed=terms.config.seed)
            model = model.with_network(lineage.id, ModelState.first(weights, lineage))
    for lineage in state.lineages:
        if not lineage.living and lineage.id in model.network_ids:
            model = model.without_network(lineage.id, lineage)
    return model


def _first_model(terms: Terms, state: RunState) -> ModelState:
    """First weights of every network that is in use before the first round."""
    seed, given = terms.config.seed, terms.config.first_weights
    first, *others = all_lineages(terms, state.lineages)
    if not first.living:
        model = ModelState(shared={})
    elif given is None:
        model = ModelState.first(init_state(terms.network, seed))
    else:
        model = _given_model(given, terms.network)
    for one in others:
        drawn = init_state(terms.declared(one).network, seed)
        model = model.with_network(one.id, ModelState.first(drawn, one))
    return model if first.living else model.without_network(first.id, first)


def _given_model(given: FirstWeights, network: Network) -> ModelState:
    """The model that a run is to begin with, its tensors in the order in which its network declares them."""
    try:
        content = Path(given.file).read_bytes()
    except OSError as error:
        raise FileError(f"first weights {given.file} cannot be read: {error.strerror}; restore that file") from error
    found = hashlib.sha256(content).hexdigest()
    if found != given.sha256:
        raise FileError(
            f"first weights {given.file} have the sha256 {found}, but must have {given.sha256}; restore that file, or "
            "begin another run"
        )
    stored = unpacked(load(content)).of(given.network)
    weights = stored.shared
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != {name: decl.shape for name, decl in network.tensors.items()}:
        raise ConfigError(f"first weights {given.file} are of another network than the run's; name that as its model")
    return ModelState(shared={name: weights[name] for name in network.tensors}, untrained=stored.untrained)


def standing_result(terms: Terms, state: RunState, journal: Journal, checkpoints: Path) -> RunResult:
    """The result of a run as far as it is.

    Args:
        terms: of the run.
        state: in which it is.
        journal: of the same.
        checkpoints: folder of the models after its rounds.
    """
    records, evaluations = journal.records(), journal.evaluations()
    searched = searched_round(terms, state)
    return RunResult(
        run_id=terms.run_id,
        method=terms.config.method.TYPE,
        method_status=method_status(terms.config.method, terms.config.setting, counted_outliers(records).altered),
        finished=state.phase == "finished",
        accuracy=records[-1].accuracy if records else None,
        rounds=records,
        deployed=deployed_models(terms, [seat for _, seat in sorted(state.seats.items())]),
        model_path=checkpoint_path(checkpoints, state.folded_round) if state.folded_round else None,
        supernet_path=checkpoint_path(checkpoints, searched) if searched else None,
        networks=network_records(terms, state, records, evaluations),
        evaluations=evaluations,
        generations=journal.generations(),
        ended_early=why_early(terms, state),
        programs_from=counting_turns(terms, state),
    )
