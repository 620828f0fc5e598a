"""How a run stands, or ended: what its state and its journal tell."""

from pathlib import Path

from subfleet.folding.checkpoint import checkpoint_path
from subfleet.journal.journal import Journal
from subfleet.journal.lineages import network_records
from subfleet.journal.outliers import counted_outliers
from subfleet.journal.records import RunResult
from subfleet.journal.rows import deployed_models
from subfleet.methods.describing import method_status
from subfleet.rounds.continuing import why_early
from subfleet.rounds.networks import counting_turns
from subfleet.rounds.searching import searched_round
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms

__all__ = ["standing_result"]


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
