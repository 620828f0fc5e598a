"""The model that a run stands at: that of its last checkpoint, or of first weights."""

from pathlib import Path

from subfleet.elastic.building import init_state
from subfleet.elastic.model_state import ModelState, unpacked
from subfleet.folding.checkpoint import load_checkpoint
from subfleet.journal.journal import Journal
from subfleet.protocol.errors import FileError
from subfleet.rounds.networks import all_lineages
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms

__all__ = ["loaded_model"]


def loaded_model(terms: Terms, state: RunState, journal: Journal, checkpoints: Path) -> ModelState:
    """The model from which the next round starts.

    Raises:
        FileError: its checkpoint is lost.
    """
    if state.folded_round == 0:
        return _first_model(terms, state)
    sha256 = journal.checkpoint_sha256(state.folded_round)
    if sha256 is None:
        raise FileError(f"the journal has no checkpoint of round {state.folded_round}; restore the state folder")
    stored = unpacked(load_checkpoint(checkpoints, state.folded_round, sha256))
    return stored.ordered(lambda lineage: terms.declared(lineage).network.tensors)


def _first_model(terms: Terms, state: RunState) -> ModelState:
    """First weights of every network that is in use before the first round."""
    seed = terms.config.seed
    first, *others = all_lineages(terms, state.lineages)
    model = ModelState(shared=init_state(terms.network, seed) if first.living else {})
    for one in others:
        weights = init_state(terms.declared(one).network, seed)
        model = model.with_network(one.id, ModelState(shared=weights, lineage=one))
    return model if first.living else model.without_network(first.id, first)
