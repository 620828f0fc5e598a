"""Builds the records of closed rounds and evaluations from client states."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from subfleet.elastic.cost import part_costs
from subfleet.elastic.update_form import update_bytes
from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow
from subfleet.journal.generations import GenerationRecord, build_generation_record
from subfleet.journal.records import ClientRow, DeployedModel, RoundRecord
from subfleet.link.traffic import Traffic
from subfleet.protocol.answers import sum_totals
from subfleet.protocol.disk import needed_bytes
from subfleet.protocol.metric_sums import Totals
from subfleet.protocol.task import Train
from subfleet.protocol.task_kinds import TaskKind, compute_metrics
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import estimate_size, get_network
from subfleet.rounds.selection import estimate_time
from subfleet.rounds.signals import Close, CloseEvaluation, CloseGeneration
from subfleet.rounds.state import ClientState
from subfleet.rounds.weights import Weight, weigh_round
from subfleet.search.candidates import Candidate


def build_round_record(context: RunContext, close: Close, traffic: Traffic) -> RoundRecord:
    """The record of a closed round."""
    weights = _weigh(context, close)
    return RoundRecord(
        round=close.round,
        accuracy=close.result.accuracy,
        loss=close.result.loss,
        seconds=close.seconds,
        log_time_s=context.config.log_time_s(close.run_attempt),
        clients=tuple(
            _build_client_row(context, close, client, traffic, weights.get(client.client_id))
            for client in close.clients
        ),
        programs_written=close.exported,
        calibrated=context.config.calibrates(close.round),
        failed_attempts=close.failed_attempts,
        model_bytes=close.result.model_bytes,
        model=close.result.model,
        metrics=dict(close.result.metrics),
        headline=context.config.training.objective.kind.headline,
    )


def build_record(
    context: RunContext, close: Close | CloseEvaluation | CloseGeneration, traffic: Traffic
) -> RoundRecord | EvaluationRecord | GenerationRecord:
    """The record of what was closed."""
    if isinstance(close, CloseGeneration):
        return build_generation_record(close, traffic)
    if isinstance(close, Close):
        return build_round_record(context, close, traffic)
    return build_evaluation_record(context, close, traffic)


def build_evaluation_record(context: RunContext, close: CloseEvaluation, traffic: Traffic) -> EvaluationRecord:
    """The record of a closed evaluation."""
    kind = context.config.training.objective.kind
    answers = (client.evaluated for client in close.clients if client.stage == "done")
    found = [sum_totals(answer) for answer in answers if answer is not None]
    return EvaluationRecord(
        round=close.round,
        seconds=close.seconds,
        clients=tuple(_build_evaluation_row(kind, client, traffic) for client in close.clients),
        headline=kind.headline,
        together=compute_metrics(kind, Totals.of_all(found)) if found else {},
    )


def _build_evaluation_row(kind: TaskKind, client: ClientState, traffic: Traffic) -> EvaluationRow:
    down, up = traffic.of(client.client_id)
    row = EvaluationRow(
        client_id=client.client_id,
        device=client.device,
        architecture=client.size.name if client.size is not None else "",
        architecture_id=client.size.architecture_id if client.size is not None else "",
        network=client.size.network if client.size is not None else "",
        bytes_down=down,
        bytes_up=up,
        status="evaluated" if client.stage == "done" else f"{client.stage}: {client.reason}",
    )
    found = client.evaluated
    if found is None:
        return row
    metrics = compute_metrics(kind, sum_totals(found))
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


def _weigh(context: RunContext, close: Close) -> dict[str, Weight]:
    """The weight of each update in the mean of its network."""
    by_network: dict[str, list[ClientState]] = {}
    for client in close.clients:
        if client.stage == "done" and client.architecture is not None:
            by_network.setdefault(client.architecture.network, []).append(client)
    weights: dict[str, Weight] = {}
    for clients in by_network.values():
        weights |= weigh_round(context.weigh(close.round), clients, context.config.max_client_fraction)
    return weights


def _build_client_row(
    context: RunContext, close: Close, client: ClientState, traffic: Traffic, weight: Weight | None
) -> ClientRow:
    candidate = estimate_size(context, close.lineages, client.size) if client.size is not None else None
    down, up = traffic.of(client.client_id)
    row = ClientRow(
        client_id=client.client_id,
        device=client.device,
        runtime=client.offer.runtime if candidate is not None else "",
        architecture=candidate.architecture.name if candidate is not None else "",
        architecture_id=candidate.architecture.architecture_id if candidate is not None else "",
        parameters=candidate.parameters if candidate is not None else 0,
        memory_free_bytes=client.offer.memory_free_bytes,
        budget_bytes=client.offer.memory_budget_bytes,
        downlink_budget_bytes=client.offer.budget.downlink_bytes if client.offer.budget is not None else None,
        uplink_budget_bytes=client.offer.budget.uplink_bytes if client.offer.budget is not None else None,
        update_bytes=_compute_update_bytes(context, close, client),
        planned_peak_bytes=client.task.planned_peak_bytes if client.task is not None else 0,
        measured_peak_bytes=client.update.measured_peak_bytes if client.update is not None else None,
        bytes_down=down,
        bytes_up=up,
        seconds=client.update.seconds if client.update is not None else None,
        loss=client.update.loss if client.update is not None else None,
        sample_count=client.update.sample_count if client.update is not None else 0,
        status="aggregated" if client.stage == "done" else f"{client.stage}: {client.reason}",
        refusals="; ".join(client.refusals),
        weight=weight.counted if weight is not None else 0.0,
        share=weight.share if weight is not None else 0.0,
        lowered=weight.lowered if weight is not None else "",
        outlier=client.outlier,
        scale=client.scale,
        limit=client.limit,
        data_warning=client.offer.data_warning,
        disk_budget_bytes=client.offer.budget.disk_bytes if client.offer.budget is not None else None,
        disk_bytes=needed_bytes(client.task) if client.task is not None else 0,
    )
    if candidate is not None:
        row = _add_costs(context, close, client, row, candidate)
    if client.given is None or client.given.requested is None or row.utilisation is None:
        return row
    wanted = estimate_size(context, close.lineages, client.given.requested.program.size)
    lost = max(0.0, 1 - row.parameters / wanted.parameters)
    return replace(row, requested=wanted.architecture.name, parameters_lost=lost)


def _add_costs(
    context: RunContext, close: Close, client: ClientState, row: ClientRow, candidate: Candidate
) -> ClientRow:
    """The row with the estimated costs of the client's task, and the costs of its training."""
    drawn = _average_macs(context, close, client)
    if drawn and client.architecture is not None:  # it trained paths of a subspace
        candidate = replace(estimate_size(context, close.lineages, client.architecture), forward_macs=drawn)
        row = replace(row, parameters=candidate.parameters)
    student = None if client.given is None else client.given.student
    nested = 0 if student is None else estimate_size(context, close.lineages, student).forward_macs
    row = replace(row, network=candidate.architecture.network, forward_macs=candidate.forward_macs + nested)
    update = client.update
    if client.task is None or not isinstance(client.task.work, Train):
        return row
    training = client.task.work.settings
    cost = replace(candidate, forward_macs=row.forward_macs, update_bytes=row.update_bytes)
    expected = estimate_time(context, client, cost, training)
    samples = 0 if update is None else min(update.sample_count, training.round_count(client.offer.sample_count))
    return replace(
        row,
        sample_passes=training.passes_over(samples),
        took_s=client.trained.took_s or None if client.trained is not None else None,
        expected_training_s=expected.training_s,
        expected_downlink_s=expected.downlink_s,
        expected_uplink_s=expected.uplink_s,
    )


def _average_macs(context: RunContext, close: Close, client: ClientState) -> int:
    """Mean multiply-accumulates of the paths that a client drew, over its examples; 0 if it drew none."""
    update = client.update
    if update is None or not update.operator_examples or client.architecture is None:
        return 0
    network = get_network(context, close.lineages, client.architecture).network
    parts = part_costs(network)
    macs = float(parts[""][1])
    for choice, own in update.operator_examples:
        examples = sum(count for _, count in own)
        macs += sum(count * parts[f"{choice}.{name}"][1] for name, count in own) / max(examples, 1)
    return round(macs)


def _compute_update_bytes(context: RunContext, close: Close, client: ClientState) -> int:
    """Bytes of the update that the task asks for; 0 if it asks for none."""
    if client.task is None or not isinstance(client.task.work, Train):
        return 0
    work = client.task.work
    network = get_network(context, close.lineages, client.task.architecture).network
    return update_bytes(network, client.task.architecture, work.update_codec, work.sends)


def list_deployed_models(context: RunContext, clients: Iterable[ClientState]) -> tuple[DeployedModel, ...]:
    """The models that were made for clients in the deploy phase."""
    return tuple(
        DeployedModel(
            client_id=client.client_id,
            target=model.target,
            path=Path(model.file),
            architecture=client.size.name if client.size is not None else "",
            architecture_id=client.size.architecture_id if client.size is not None else "",
            max_abs_diff=model.max_abs_diff,
            quantised_accuracy=model.quantised_accuracy,
            float_accuracy=model.float_accuracy,
            status="deployed" if client.stage == "done" else f"{client.stage}: {client.reason}",
        )
        for client in clients
        for model in client.models
    )
