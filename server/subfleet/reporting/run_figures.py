"""Figures of a whole run as plain data: accuracies, bytes, multiplications, violations and use of budgets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from subfleet.aggregation.views import Views
from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.model_state import ModelState
from subfleet.journal.records import ClientRow, RunResult
from subfleet.methods.aggregator import Participant
from subfleet.protocol.task_kinds import better
from subfleet.rounds.context import RunContext
from subfleet.tasks import Dataset


class Gallery:
    """The final models of all clients; equal models are evaluated once for each data set.

    Attributes:
        context: of the run.
        state: the model after the last round.
        samples: evaluation data of the server without validation samples.
        own: by client id, the client with its final submodel, for clients that were aggregated at least once; if its
            network was retired, with the submodel that the method has in its place.
    """

    def __init__(
        self, context: RunContext, state: ModelState, samples: Dataset, own: Mapping[str, Participant]
    ) -> None:
        self.context, self.state, self.samples, self.own = context, state, samples, own
        self._views = Views(context=context, samples=torch.from_numpy(samples.inputs.copy()))
        self._known: dict[tuple[int, tuple[str, ...]], Mapping[str, float]] = {}

    def metrics(self, client: Participant, data: Dataset) -> Mapping[str, float]:
        """The metrics of a client's submodel on a data set."""
        view = self._views.of(self.state, client)
        key = (id(data), view.key)
        if key not in self._known:
            inputs, labels = torch.from_numpy(data.inputs.copy()), torch.from_numpy(data.labels.copy())
            weights, objective = self._views.prepare_tensors(view), self.context.config.training.objective.name
            evaluation = evaluate(view.network, client.architecture, weights, inputs, labels, objective=objective)
            self._known[key] = evaluation.metrics
        return self._known[key]


def compute_figures(gallery: Gallery, result: RunResult, tiers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The figures of a run with at least one aggregated round: of its models, and `count_figures`.

    If the headline metric is not accuracy, tiers and clients have that metric instead. The accuracy of a tier is the
    mean accuracy of its clients' final submodels on the evaluation samples, over clients that were aggregated at least
    once. The own accuracy of a client is its last result on its held-out samples.

    Args:
        gallery: models of the clients.
        result: of the run.
        tiers: tier by client id; by default the name of the client's device.

    Returns:
        accuracy, loss: of the last round.
        tiers: accuracy by tier, None for a tier without one. worst_tier; submodels: mean over all clients of their
        tier's accuracy; both None if a tier has none. submodels_accuracy: mean accuracy of submodels, if the headline
        is another metric.
        own: accuracy by client. own_mean, own_worst: if clients have held-out samples.
    """
    rounds = result.rounds
    known = _list_tiers(result, tiers)
    return {
        "accuracy": rounds[-1].accuracy,
        "metrics": rounds[-1].all_metrics,
        "loss": rounds[-1].loss,
        **_compute_accuracies(gallery, result, known, _list_aggregated(result)),
        **count_figures(result, known),
    }


def count_figures(result: RunResult, tiers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The figures of a run that need no model.

    Args:
        result: of the run.
        tiers: tier by client id; by default the name of the client's device.

    Returns:
        participation: aggregated fraction of all due updates; least_participation: of the worst round.
        never_aggregated: number of clients.
        bytes_down, bytes_up, macs: of all rounds.
        violations: number of tasks beyond a budget, see `violates`. utilisation: mean over all tasks.
        parameters_lost: mean loss due to programs that were not written yet. programs_written: number of programs.
        over_link: number of tasks that moved more bytes than a link's budget, which covers weights and updates but not
        programs and messages.
    """
    rounds = result.rounds
    rows = [row for record in rounds for row in record.clients]
    return {
        "participation": result.participation,
        "least_participation": min(record.participation for record in rounds),
        "never_aggregated": len(_list_tiers(result, tiers)) - len(_list_aggregated(result)),
        "bytes_down": sum(row.bytes_down for row in rows),
        "bytes_up": sum(row.bytes_up for row in rows),
        "macs": sum(row.training_macs for row in rows),
        "violations": sum(violates(row) for row in rows),
        "over_link": sum(_exceeds_links(row, row.bytes_down, row.bytes_up) for row in rows if row.planned_peak_bytes),
        "utilisation": _average([used for row in rows if (used := row.utilisation) is not None]),
        "parameters_lost": _average([row.parameters_lost for row in rows if row.utilisation is not None]),
        "programs_written": sum(record.programs_written for record in rounds),
    }


def _list_tiers(result: RunResult, tiers: Mapping[str, str] | None) -> Mapping[str, str]:
    if tiers is not None:
        return tiers
    return {row.client_id: row.device for record in result.rounds for row in record.clients}


def _list_aggregated(result: RunResult) -> set[str]:
    return {row.client_id for record in result.rounds for row in record.aggregated}


def violates(row: ClientRow) -> bool:
    """Whether a task exceeded a budget: planned memory, disk, weights down, or update up."""
    disk_bytes = row.disk_budget_bytes
    exceeded = (
        row.planned_peak_bytes > row.budget_bytes,
        disk_bytes is not None and row.disk_bytes > disk_bytes,
        _exceeds_links(row, row.weight_bytes, row.update_bytes),
    )
    return row.planned_peak_bytes > 0 and any(exceeded)


def _compute_accuracies(
    gallery: Gallery, result: RunResult, tiers: Mapping[str, str], aggregated: set[str]
) -> dict[str, Any]:
    headline = gallery.context.config.training.objective.kind.headline
    metrics = {name: gallery.metrics(gallery.own[name], gallery.samples) for name in tiers if name in gallery.own}
    of_tiers = {tier: [metrics[name][headline] for name in metrics if tiers[name] == tier] for tier in tiers.values()}
    accuracies = [own.get("accuracy", 0.0) for own in metrics.values()]
    evaluated = result.evaluations[-1].evaluated if result.evaluations else ()
    known = {row.client_id: row.value(headline) for row in evaluated if row.client_id in aggregated}
    own = {name: value for name, value in known.items() if value is not None}
    means = {tier: _average(values) if values else None for tier, values in of_tiers.items()}
    each = [mean for tier in tiers.values() if (mean := means[tier]) is not None]
    whole = len(each) == len(tiers)
    worst = min if better(headline) > 0 else max
    return {
        "tiers": means,
        "worst_tier": worst(each) if whole else None,
        "submodels": _average(each) if whole else None,
        **({"submodels_accuracy": _average(accuracies)} if any(accuracies) and headline != "accuracy" else {}),
        "own": own,
        **({"own_mean": _average(list(own.values())), "own_worst": worst(own.values())} if own else {}),
    }


def _exceeds_links(row: ClientRow, bytes_down: int, bytes_up: int) -> bool:
    moved = ((bytes_down, row.downlink_budget_bytes), (bytes_up, row.uplink_budget_bytes))
    return any(link_bytes is not None and moved_bytes > link_bytes for moved_bytes, link_bytes in moved)


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
