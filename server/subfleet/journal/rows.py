"""Builds the records of a run: of closed rounds, evaluations and generations, of deployed models, and of networks."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from subfleet.elastic.cost import part_costs
from subfleet.elastic.growing import find_changed_cells
from subfleet.elastic.update_form import update_bytes
from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow
from subfleet.journal.networks import DevicesRecord, GenerationRecord, NetworkRecord
from subfleet.journal.records import ClientRow, DeployedModel, RoundRecord, select_fields
from subfleet.link.traffic import Traffic
from subfleet.protocol.answers import sum_totals
from subfleet.protocol.disk import needed_bytes
from subfleet.protocol.metric_sums import Totals
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Train
from subfleet.protocol.task_kinds import TaskKind, compute_metrics
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import estimate_size, find_trainable_attempts, get_network, list_lineages
from subfleet.rounds.ongoing import compute_staleness
from subfleet.rounds.selection import estimate_time
from subfleet.rounds.signals import AnyClose, Close, CloseEvaluation, CloseGeneration
from subfleet.rounds.state import ClientState, RunState, Submodel
from subfleet.rounds.weights import Weight, weigh_round
from subfleet.search.candidates import Candidate


def build_record(
    context: RunContext, close: AnyClose, traffic: Traffic
) -> RoundRecord | EvaluationRecord | GenerationRecord:
    """The record of what was closed."""
    if isinstance(close, CloseGeneration):
        return build_generation_record(close, traffic)
    if isinstance(close, Close):
        return build_round_record(context, close, traffic)
    return build_evaluation_record(context, close, traffic)


def build_round_record(context: RunContext, close: Close, traffic: Traffic) -> RoundRecord:
    """The record of a closed round."""
    weights = _weigh(context, close)
    return RoundRecord(
        **select_fields(close, "round", "seconds", "failed_attempts"),
        **select_fields(close.result, "accuracy", "loss", "model_bytes", "model"),
        metrics=dict(close.result.metrics),
        log_time_s=context.config.log_time_s(close.run_attempt),
        clients=tuple(
            _build_client_row(context, close, client, traffic, weights.get(client.client_id))
            for client in close.clients
        ),
        idle=dict(close.idle),
        programs_written=close.exported,
        calibrated=context.config.calibrates(close.round),
        headline=context.config.training.objective.kind.headline,
    )


def build_evaluation_record(context: RunContext, close: CloseEvaluation, traffic: Traffic) -> EvaluationRecord:
    """The record of a closed evaluation."""
    kind = context.config.training.objective.kind
    answers = (client.evaluated for client in close.clients if client.stage == "done")
    totals = [sum_totals(answer) for answer in answers if answer is not None]
    return EvaluationRecord(
        round=close.round,
        seconds=close.seconds,
        clients=tuple(_build_evaluation_row(kind, client, traffic) for client in close.clients),
        headline=kind.headline,
        together=compute_metrics(kind, Totals.of_all(totals)) if totals else {},
    )


def build_generation_record(close: CloseGeneration, traffic: Traffic) -> GenerationRecord:
    """The record of a scored generation of paths."""
    generation, scores = close.generation, close.devices
    moved = [] if scores is None else [traffic.of(name) for name in scores.clients]
    devices = (
        None
        if scores is None
        else DevicesRecord(
            **select_fields(scores, "answers", "labels", "supernet_bytes", "ranks"),
            rounds=scores.closed,
            bytes_down=sum(down for down, _ in moved),
            bytes_up=sum(up for _, up in moved),
        )
    )
    best = max(range(len(close.scores)), key=lambda index: close.scores[index])
    return GenerationRecord(
        round=close.round,
        number=generation.number,
        tier=generation.tier,
        paths=len(generation.paths),
        best=close.scores[best],
        best_path=generation.paths[best],
        mean=statistics.fmean(close.scores),
        seconds=close.seconds,
        devices=devices,
    )


def list_deployed_models(clients: Iterable[ClientState]) -> tuple[DeployedModel, ...]:
    """The models that were made for clients in the deploy phase."""
    return tuple(
        DeployedModel(
            **select_fields(model, "target", "max_abs_diff", "quantised_accuracy", "float_accuracy"),
            client_id=client.client_id,
            path=Path(model.file),
            architecture=client.size.name if client.size is not None else "",
            status=_describe_status(client, "deployed"),
        )
        for client in clients
        for model in client.models
    )


def _describe_client(client: ClientState, outcome: str, traffic: Traffic) -> dict[str, Any]:
    """The fields that the rows of rounds and evaluations share; `outcome` is the status of a client with an answer."""
    down, up = traffic.of(client.client_id)
    return {
        "client_id": client.client_id,
        "device": client.device,
        "architecture": client.size.name if client.size is not None else "",
        "architecture_id": client.size.architecture_id if client.size is not None else "",
        "network": client.size.network if client.size is not None else "",
        "bytes_down": down,
        "bytes_up": up,
        "status": _describe_status(client, outcome),
    }


def _describe_status(client: ClientState, outcome: str) -> str:
    return outcome if client.stage == "done" else f"{client.stage}: {client.reason}"


def _build_evaluation_row(kind: TaskKind, client: ClientState, traffic: Traffic) -> EvaluationRow:
    answer = client.evaluated
    metrics = {} if answer is None else compute_metrics(kind, sum_totals(answer))
    has_accuracy = metrics.pop("accuracy", None) is not None
    return EvaluationRow(
        **_describe_client(client, "evaluated", traffic),
        **select_fields(answer, "loss", "sample_count", "label_count", "class_counts", "class_correct", "seconds"),
        accuracy=answer.accuracy if answer is not None and has_accuracy else None,
        metrics=metrics,
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
    offer = client.offer
    row = ClientRow(
        **_describe_client(client, "aggregated", traffic),
        **select_fields(client, "outlier", "scale", "limit"),
        **select_fields(offer, "memory_free_bytes", "data_warning"),
        **select_fields(client.update, "measured_peak_bytes", "seconds", "loss", "sample_count"),
        **select_fields(weight, "share", "lowered"),
        **_describe_work(context, close, client),
        weight=weight.counted if weight is not None else 0.0,
        budget_bytes=offer.memory_budget_bytes,
        downlink_budget_bytes=offer.budget.downlink_bytes,
        uplink_budget_bytes=offer.budget.uplink_bytes,
        disk_budget_bytes=offer.budget.disk_bytes,
        refusals="; ".join(client.refusals),
        training_joules=_measure_joules(client),
        staleness=0 if client.update is None else compute_staleness(close.round, client),
    )
    if client.given is None or client.given.requested is None or row.utilisation is None:
        return row
    preferred = estimate_size(context, close.lineages, client.given.requested.program.size)
    lost = max(0.0, 1 - row.parameters / preferred.parameters)
    return replace(row, requested=preferred.architecture.name, parameters_lost=lost)


def _describe_work(context: RunContext, close: Close, client: ClientState) -> dict[str, Any]:
    """The fields that describe a client's task and its submodel; none without them."""
    task, fields = client.task, dict[str, Any]()
    if task is not None:
        fields |= {"planned_peak_bytes": task.planned_peak_bytes, "disk_bytes": needed_bytes(task)}
    if client.given is None:
        return fields
    cost = _estimate_cost(context, close, client, client.given)
    fields |= {"runtime": client.offer.runtime, "parameters": cost.parameters, "forward_macs": cost.forward_macs}
    if task is not None and isinstance(task.work, Train):
        fields |= _describe_training(context, close, client, task.architecture, task.work, cost)
    return fields


def _measure_joules(client: ClientState) -> float | None:
    """The power of its profile for as long as its steps took by its own clock."""
    watts, update = client.offer.training_watts, client.update
    return None if watts is None or update is None else watts * update.train_seconds


def _estimate_cost(context: RunContext, close: Close, client: ClientState, given: Submodel) -> Candidate:
    """The costs of a submodel with its nested one; of a subspace, the mean over the paths that the client drew."""
    drawn = _average_macs(context, close, client)
    cost = estimate_size(context, close.lineages, given.architecture if drawn else given.size)
    student = 0 if given.student is None else estimate_size(context, close.lineages, given.student).forward_macs
    return replace(cost, forward_macs=(drawn or cost.forward_macs) + student)


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


def _describe_training(
    context: RunContext, close: Close, client: ClientState, architecture: Architecture, work: Train, cost: Candidate
) -> dict[str, Any]:
    """The fields on the training of a submodel, from its costs."""
    network = get_network(context, close.lineages, architecture).network
    size_bytes = update_bytes(network, architecture, work.update_codec, work.sends)
    expected = estimate_time(context, client, replace(cost, update_bytes=size_bytes), work.settings)
    samples = 0 if client.update is None else client.update.sample_count
    return {
        "update_bytes": size_bytes,
        "sample_passes": work.settings.passes_over(min(samples, work.settings.round_count(client.offer.sample_count))),
        "took_s": client.trained.took_s or None if client.trained is not None else None,
        **{f"expected_{name}": getattr(expected, name) for name in ("training_s", "downlink_s", "uplink_s")},
    }


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
    lineages = {lineage.id: lineage for lineage in list_lineages(context, state.lineages)}
    attempts = find_trainable_attempts(context, state)
    last = evaluations[-1].evaluated if evaluations else ()
    headline = context.config.training.objective.kind.headline
    records = []
    for lineage in lineages.values():
        declared = context.get_declared(lineage)
        whole = declared.estimate(declared.network.full_architecture())
        parent = None if lineage.parent is None else context.get_declared(lineages[lineage.parent]).network
        wider, deeper = ((), ()) if parent is None else find_changed_cells(parent, declared.network)
        rows = [(record.round, row) for record in rounds for row in record.clients if row.network == lineage.id]
        trained: dict[int, tuple[str, ...]] = {}
        for round_number, row in rows:
            if row.status == "aggregated" and row.sample_passes:
                trained[round_number] = (*trained.get(round_number, ()), row.client_id)
        known = {row.client_id: row.value(headline) for row in last if row.network == lineage.id}
        own = {name: value for name, value in known.items() if value is not None}
        record = NetworkRecord(
            lineage=lineage,
            parameters=whole.parameters,
            forward_macs=whole.forward_macs,
            wider=wider,
            deeper=deeper,
            trained=trained,
            training_macs=sum(row.training_macs for _, row in rows),
            ready_round=_find_ready_round(rounds, attempts.get(lineage.id), min(trained, default=None)),
            owners=tuple(own),
            own_mean=math.fsum(own.values()) / len(own) if own else None,
            metric=headline,
        )
        records.append(record)
    return tuple(records)


def _find_ready_round(rounds: Sequence[RoundRecord], ready_attempt: int | None, trained: int | None) -> int | None:
    """The first round with a program for the network; by its training if its programs are unknown."""
    lost = accumulate(record.failed_attempts for record in rounds)
    known = [] if trained is None else [trained]
    if ready_attempt is not None:
        attempts = zip(rounds, lost, strict=True)
        known += [record.round for record, before in attempts if record.round + before >= ready_attempt]
    return min(known, default=None)
