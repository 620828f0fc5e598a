"""From seats to the rows that people read."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from subfleet.elastic.cost import part_costs
from subfleet.elastic.update_form import update_bytes
from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow
from subfleet.journal.generations import GenerationRecord, generation_record
from subfleet.journal.records import ClientRow, DeployedModel, RoundRecord
from subfleet.link.traffic import Traffic
from subfleet.protocol.disk import needed_bytes
from subfleet.protocol.evaluating import totals_of
from subfleet.protocol.metric_sums import Totals
from subfleet.protocol.task import Train
from subfleet.protocol.task_kinds import TaskKind, metrics_of
from subfleet.rounds.actions import Close, CloseEvaluation, CloseGeneration
from subfleet.rounds.networks import declared_of, price_of
from subfleet.rounds.selection import expected_time
from subfleet.rounds.state import Seat
from subfleet.rounds.terms import Terms
from subfleet.rounds.weights import Weight, round_weights
from subfleet.search.candidates import Candidate

__all__ = ["deployed_models", "evaluation_record", "record_of", "round_record"]


def round_record(terms: Terms, close: Close, traffic: Traffic) -> RoundRecord:
    """The record of a closed round."""
    weights = _weights(terms, close)
    return RoundRecord(
        round=close.round,
        accuracy=close.accuracy,
        loss=close.loss,
        seconds=close.seconds,
        log_time_s=terms.config.log_time_s(close.turn),
        clients=tuple(_client_row(terms, close, seat, traffic, weights.get(seat.client_id)) for seat in close.seats),
        programs_written=close.exported,
        calibrated=terms.config.calibrates(close.round),
        retries=close.retries,
        model_bytes=close.model_bytes,
        model=close.model,
        metrics=dict(close.metrics),
        headline=terms.config.training.objective.kind.headline,
    )


def record_of(
    terms: Terms, close: Close | CloseEvaluation | CloseGeneration, traffic: Traffic
) -> RoundRecord | EvaluationRecord | GenerationRecord:
    """The record of what was closed."""
    if isinstance(close, CloseGeneration):
        return generation_record(close, traffic)
    return round_record(terms, close, traffic) if isinstance(close, Close) else evaluation_record(terms, close, traffic)


def evaluation_record(terms: Terms, close: CloseEvaluation, traffic: Traffic) -> EvaluationRecord:
    """The record of a closed evaluation."""
    kind = terms.config.training.objective.kind
    found = [totals_of(seat.evaluated) for seat in close.seats if seat.stage == "done" and seat.evaluated is not None]
    return EvaluationRecord(
        round=close.round,
        seconds=close.seconds,
        clients=tuple(_evaluation_row(kind, seat, traffic) for seat in close.seats),
        headline=kind.headline,
        together=metrics_of(kind, Totals.of_all(found)) if found else {},
    )


def _evaluation_row(kind: TaskKind, seat: Seat, traffic: Traffic) -> EvaluationRow:
    down, up = traffic.of(seat.client_id)
    row = EvaluationRow(
        client_id=seat.client_id,
        device=seat.device,
        spec=seat.size.name if seat.size is not None else "",
        spec_id=seat.size.spec_id if seat.size is not None else "",
        network=seat.size.network if seat.size is not None else "",
        bytes_down=down,
        bytes_up=up,
        status="evaluated" if seat.stage == "done" else f"{seat.stage}: {seat.reason}",
    )
    found = seat.evaluated
    if found is None:
        return row
    metrics = metrics_of(kind, totals_of(found))
    accuracy = found.accuracy if metrics.pop("accuracy", None) is not None else None
    return replace(
        row,
        loss=found.loss,
        accuracy=accuracy,
        metrics=metrics,
        sample_count=found.sample_count,
        label_count=found.label_count,
        class_counts=found.class_counts,
        class_correct=found.class_correct,
        seconds=found.seconds,
    )


def _weights(terms: Terms, close: Close) -> dict[str, Weight]:
    """What each update counts in the mean of its network."""
    by_network: dict[str, list[Seat]] = {}
    for seat in close.seats:
        if seat.stage == "done" and seat.spec is not None:
            by_network.setdefault(seat.spec.network, []).append(seat)
    found = (
        round_weights(terms.weigh(close.round), seats, terms.config.max_client_share) for seats in by_network.values()
    )
    return {name: weight for of_network in found for name, weight in of_network.items()}


def _client_row(terms: Terms, close: Close, seat: Seat, traffic: Traffic, weight: Weight | None) -> ClientRow:
    candidate = price_of(terms, close.lineages, seat.size) if seat.size is not None else None
    down, up = traffic.of(seat.client_id)
    row = ClientRow(
        client_id=seat.client_id,
        device=seat.device,
        runtime=seat.offer.runtime if candidate is not None else "",
        spec=candidate.spec.name if candidate is not None else "",
        spec_id=candidate.spec.spec_id if candidate is not None else "",
        parameters=candidate.parameters if candidate is not None else 0,
        memory_free_bytes=seat.offer.memory_free_bytes,
        budget_bytes=seat.offer.memory_budget_bytes,
        downlink_budget_bytes=seat.offer.budget.downlink_bytes if seat.offer.budget is not None else None,
        uplink_budget_bytes=seat.offer.budget.uplink_bytes if seat.offer.budget is not None else None,
        update_bytes=_update_bytes(terms, close, seat),
        planned_peak_bytes=seat.task.planned_peak_bytes if seat.task is not None else 0,
        measured_peak_bytes=seat.update.measured_peak_bytes if seat.update is not None else None,
        bytes_down=down,
        bytes_up=up,
        seconds=seat.update.seconds if seat.update is not None else None,
        loss=seat.update.loss if seat.update is not None else None,
        sample_count=seat.update.sample_count if seat.update is not None else 0,
        status="folded" if seat.stage == "done" else f"{seat.stage}: {seat.reason}",
        refusals="; ".join(seat.refusals),
        weight=weight.counted if weight is not None else 0.0,
        share=weight.share if weight is not None else 0.0,
        lowered=weight.lowered if weight is not None else "",
        outlier=seat.outlier,
        scale=seat.scale,
        limit=seat.limit,
        data_warning=seat.offer.data_warning,
        disk_budget_bytes=seat.offer.budget.disk_bytes if seat.offer.budget is not None else None,
        disk_bytes=needed_bytes(seat.task) if seat.task is not None else 0,
    )
    if candidate is not None:
        row = _with_costs(terms, close, seat, row, candidate)
    if seat.given is None or seat.given.wanted is None or row.utilisation is None:
        return row
    wanted = price_of(terms, close.lineages, seat.given.wanted.program.size)
    lost = max(0.0, 1 - row.parameters / wanted.parameters)
    return replace(row, wanted=wanted.spec.name, parameters_lost=lost)


def _with_costs(terms: Terms, close: Close, seat: Seat, row: ClientRow, candidate: Candidate) -> ClientRow:
    """The row with what the client's task takes, and with what its training has taken."""
    drawn = _drawn_macs(terms, close, seat)
    if drawn and seat.spec is not None:  # of a supernet it was sent a part, and has gone along paths of that
        candidate = replace(price_of(terms, close.lineages, seat.spec), forward_macs=drawn)
        row = replace(row, parameters=candidate.parameters)
    student = None if seat.given is None else seat.given.student
    nested = 0 if student is None else price_of(terms, close.lineages, student).forward_macs
    row = replace(row, network=candidate.spec.network, forward_macs=candidate.forward_macs + nested)
    update = seat.update
    if seat.task is None or not isinstance(seat.task.work, Train):
        return row
    training = seat.task.work.settings
    expected = expected_time(
        terms,
        seat,
        forward_macs=row.forward_macs,
        training=training,
        weight_bytes=candidate.weight_bytes,
        update_bytes=row.update_bytes,
    )
    samples = 0 if update is None else min(update.sample_count, training.round_count(seat.offer.sample_count))
    return replace(
        row,
        sample_passes=training.passes_over(samples),
        took_s=seat.trained.took_s or None if seat.trained is not None else None,
        expected_training_s=expected.training_s,
        expected_downlink_s=expected.downlink_s,
        expected_uplink_s=expected.uplink_s,
    )


def _drawn_macs(terms: Terms, close: Close, seat: Seat) -> int:
    """Of the paths that a client drew, the mean over its examples; 0 where it drew none."""
    update = seat.update
    if update is None or not update.operator_examples or seat.spec is None:
        return 0
    network = declared_of(terms, close.lineages, seat.spec).network
    parts = part_costs(network)
    macs = float(parts[""][1])
    for choice, own in update.operator_examples:
        examples = sum(count for _, count in own)
        macs += sum(count * parts[f"{choice}.{name}"][1] for name, count in own) / max(examples, 1)
    return round(macs)


def _update_bytes(terms: Terms, close: Close, seat: Seat) -> int:
    """Of the update that its task asks for; a score task asks for none."""
    if seat.task is None or not isinstance(seat.task.work, Train):
        return 0
    work = seat.task.work
    network = declared_of(terms, close.lineages, seat.task.spec).network
    return update_bytes(network, seat.task.spec, work.update_codec, work.sends)


def deployed_models(terms: Terms, seats: Iterable[Seat]) -> tuple[DeployedModel, ...]:
    """What the deploy phase made for each client."""
    return tuple(
        DeployedModel(
            client_id=seat.client_id,
            target=model.target,
            path=Path(model.file),
            spec=seat.size.name if seat.size is not None else "",
            spec_id=seat.size.spec_id if seat.size is not None else "",
            max_abs_diff=model.max_abs_diff,
            quantised_accuracy=model.quantised_accuracy,
            float_accuracy=model.float_accuracy,
            status="deployed" if seat.stage == "done" else f"{seat.stage}: {seat.reason}",
        )
        for seat in seats
        for model in seat.models
    )
