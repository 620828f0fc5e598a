"""The family tree of a run: a record of each network, from the records of its rounds. Pure."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from subfleet.elastic.growing import find_changed_cells
from subfleet.elastic.lineage import Lineage
from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow
from subfleet.journal.networks import NetworkRecord
from subfleet.journal.records import RoundRecord
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import find_trainable_attempts, list_lineages
from subfleet.rounds.state import RunState


def build_network_records(
    context: RunContext, state: RunState, rounds: Sequence[RoundRecord], evaluations: Sequence[EvaluationRecord]
) -> tuple[NetworkRecord, ...]:
    """A record of each network of the run, in the order in which they appeared.

    Args:
        context: of the run.
        state: of the run.
        rounds: its finished rounds, in order.
        evaluations: its evaluations by devices, in order.
    """
    lineages = {one.id: one for one in list_lineages(context, state.lineages)}
    attempts = find_trainable_attempts(context, state)
    found = evaluations[-1].evaluated if evaluations else ()
    return tuple(
        _build_record(context, lineages, one, rounds, found, attempts.get(one.id)) for one in lineages.values()
    )


def _build_record(
    context: RunContext,
    lineages: Mapping[str, Lineage],
    lineage: Lineage,
    rounds: Sequence[RoundRecord],
    evaluations: Sequence[EvaluationRow],
    ready_attempt: int | None,
) -> NetworkRecord:
    declared = context.declared(lineage)
    whole = declared.estimate(declared.network.full_architecture())
    parent = None if lineage.parent is None else context.declared(lineages[lineage.parent]).network
    wider, deeper = ((), ()) if parent is None else find_changed_cells(parent, declared.network)
    rows = [(record.round, row) for record in rounds for row in record.clients if row.network == lineage.id]
    trained: dict[int, tuple[str, ...]] = {}
    for round_number, row in rows:
        if row.status == "aggregated" and row.sample_passes:
            trained[round_number] = (*trained.get(round_number, ()), row.client_id)
    headline = context.config.training.objective.kind.headline
    known = {row.client_id: row.value(headline) for row in evaluations if row.network == lineage.id}
    own = {name: value for name, value in known.items() if value is not None}
    return NetworkRecord(
        lineage=lineage,
        parameters=whole.parameters,
        forward_macs=whole.forward_macs,
        wider=wider,
        deeper=deeper,
        trained=trained,
        training_macs=sum(row.training_macs for _, row in rows),
        ready_round=_find_ready_round(rounds, ready_attempt, min(trained, default=None)),
        owners=tuple(own),
        own_mean=math.fsum(own.values()) / len(own) if own else None,
        metric=headline,
    )


def _find_ready_round(rounds: Sequence[RoundRecord], ready_attempt: int | None, trained: int | None) -> int | None:
    """The first round with a program for the network; by its training if its programs are unknown."""
    lost = accumulate(record.failed_attempts for record in rounds)
    known = [] if trained is None else [trained]
    if ready_attempt is not None:
        attempts = zip(rounds, lost, strict=True)
        known += [record.round for record, before in attempts if record.round + before >= ready_attempt]
    return min(known, default=None)
