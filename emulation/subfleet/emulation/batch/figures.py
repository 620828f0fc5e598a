"""What a virtual run comes to, as plain data: accuracies, bytes, multiplications, violations and use of budgets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load

from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.model_state import ModelState, unpacked
from subfleet.emulation.attacks import with_trigger
from subfleet.emulation.batch.run import BatchResult
from subfleet.emulation.gathered import GatheredRun
from subfleet.folding.devices import compute_device
from subfleet.folding.trained import as_client
from subfleet.folding.views import Views
from subfleet.journal.records import ClientRow, RoundRecord, participation_of
from subfleet.methods.aggregator import Participant
from subfleet.protocol.errors import RunError
from subfleet.protocol.task_kinds import better
from subfleet.rounds.terms import Terms
from subfleet.serving.terms import terms_of
from subfleet.settings.attacks import Backdoor
from subfleet.tasks import Dataset

__all__ = ["figures", "violates", "whole_run"]


def violates(row: ClientRow) -> bool:
    """Whether a task that was sent was beyond its budget: in planned memory, on the disk, in weights, or an update."""
    if not row.planned_peak_bytes:
        return False
    if row.disk_budget_bytes is not None and row.disk_bytes > row.disk_budget_bytes:
        return True
    return row.planned_peak_bytes > row.budget_bytes or _beyond_links(row, row.weight_bytes, row.update_bytes)


def whole_run(experiment: GatheredRun, result: BatchResult) -> dict[str, Any]:
    """The figures of a run as a whole: those of `figures`, without its rounds.

    Raises:
        RunError: no round folded anything, so that there is no model.
    """
    return {name: value for name, value in figures(experiment, result).items() if name != "rounds"}


def figures(experiment: GatheredRun, result: BatchResult) -> dict[str, Any]:
    """The figures of a run.

    Where a run is judged by another metric than accuracy, that stands in its place. A tier's accuracy is the mean,
    over its clients that were ever folded, of the accuracy on the server's samples of the subnet that is each one's
    own in the end, with the weights of the end; None where there is none. A client's own accuracy is what it found
    with its subnet on its own held-out samples, when it was asked last.

    Returns:
        accuracy, loss: of the last round. rounds: each with a row per client. tiers: accuracy by tier. worst_tier, and
        subnets, the mean over all clients of their tiers' accuracy: None where a tier has none. subnets_accuracy: of
        clients with a subnet, where a run is judged by another metric. own: accuracy by client. own_mean, own_worst:
        where clients hold samples out.
        participation: of all rounds of all clients that were to take part, the share that was folded;
        least_participation: of the round with the least. never_folded: clients.
        bytes_down, bytes_up: of all rounds. macs: multiplications of all trainings. violations, utilisation: see above;
        the mean over all tasks. parameters_lost: to programs that were not written yet. programs_written: in all.
        over_link: tasks whose round moved more payload than a link's budget, which counts weights down and the update
        up alone: programs, when they are new, and messages come on top. backdoor: where clients teach a trigger, the
        share of the server's samples of other classes that the model takes for theirs once they have it; of models that
        clients have, the mean.

    Raises:
        RunError: no round folded anything, so that there is no model.
    """
    if not result.model:
        raise RunError("no round of the run folded an update, so there is no model to evaluate")
    terms = terms_of(experiment.run, experiment.run.name)
    rows = [row for record in result.rounds for row in record.clients]
    gallery = _Gallery.of(terms, experiment, result)
    return {
        "accuracy": result.rounds[-1].accuracy,
        "metrics": result.rounds[-1].all_metrics,
        "loss": result.rounds[-1].loss,
        **_accuracies(gallery, experiment, result),
        **_backdoor(gallery, experiment, result),
        "participation": participation_of(result.rounds),
        "least_participation": min(record.participation for record in result.rounds),
        "never_folded": len(experiment.devices) - len(result.trained),
        "bytes_down": sum(row.bytes_down for row in rows),
        "bytes_up": sum(row.bytes_up for row in rows),
        "macs": sum(row.training_macs for row in rows),
        "violations": sum(violates(row) for row in rows),
        "over_link": sum(_over_link(row) for row in rows),
        "utilisation": _mean([used for row in rows if (used := row.utilisation) is not None]),
        "parameters_lost": _mean([row.parameters_lost for row in rows if row.utilisation is not None]),
        "programs_written": sum(record.programs_written for record in result.rounds),
        "turns": result.turns,
        "rounds": [_round(record) for record in result.rounds],
    }


def _round(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.round,
        "accuracy": record.accuracy,
        **record.metrics,
        "loss": record.loss,
        "log_time_s": record.log_time_s,
        "participation": record.participation,
        "left_out": record.left_out,
        "clients": [_plain(row) for row in record.clients],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gallery:
    """The models that clients have in the end; each different one is evaluated once for each data set."""

    views: Views
    state: ModelState
    known: dict[tuple[int, tuple[str, ...]], Mapping[str, float]]

    @classmethod
    def of(cls, terms: Terms, experiment: GatheredRun, result: BatchResult) -> "_Gallery":
        views = Views(terms=terms, samples=torch.from_numpy(experiment.told_by.inputs.copy()))
        return cls(views=views, state=unpacked(load(result.model)).on(compute_device(terms.config.device)), known={})

    def metrics(self, client: Participant, data: Dataset) -> Mapping[str, float]:
        """Of a client's own subnet."""
        key = (id(data), self.views.key(self.state, client))
        if key not in self.known:
            inputs, labels = torch.from_numpy(data.inputs.copy()), torch.from_numpy(data.labels.copy())
            seen = self.views.for_use(self.state, client)
            network = self.views.network_of(self.state, client)
            objective = self.views.terms.config.training.objective
            self.known[key] = evaluate(network, client.spec, seen, inputs, labels, objective=objective.name).metrics
        return self.known[key]


def _accuracies(gallery: _Gallery, experiment: GatheredRun, result: BatchResult) -> dict[str, Any]:
    told_by = experiment.told_by  # one object, as what is known of a model is known by it
    headline = experiment.run.training.objective.kind.headline
    tiers: dict[str, list[float]] = {client.tier: [] for client in experiment.devices}
    accuracies = []
    for client in experiment.devices:
        if client.client_id in result.own:
            metrics = gallery.metrics(result.own[client.client_id], told_by)
            tiers[client.tier].append(metrics[headline])
            accuracies.append(metrics.get("accuracy", 0.0))
    evaluations = result.result.evaluations
    found = evaluations[-1].evaluated if evaluations else ()
    known = {row.client_id: row.value(headline) for row in found if row.client_id in result.trained}
    own = {name: value for name, value in known.items() if value is not None}
    means = {tier: _mean(found) if found else None for tier, found in tiers.items()}
    each = [mean for client in experiment.devices if (mean := means[client.tier]) is not None]
    whole = len(each) == len(experiment.devices)
    worst = min if better(headline) > 0 else max
    return {
        "tiers": means,
        "worst_tier": worst(each) if whole else None,
        "subnets": _mean(each) if whole else None,
        **({"subnets_accuracy": _mean(accuracies)} if any(accuracies) and headline != "accuracy" else {}),
        "own": own,
        **({"own_mean": _mean(list(own.values())), "own_worst": worst(own.values())} if own else {}),
    }


def _backdoor(gallery: _Gallery, experiment: GatheredRun, result: BatchResult) -> dict[str, float]:
    target = next((one.attack.target for one in experiment.devices if isinstance(one.attack, Backdoor)), None)
    if target is None:
        return {}
    triggered = with_trigger(experiment.told_by, target, 1.0, seed=0)
    others = experiment.told_by.labels != target
    # All of them are labelled with the target, so that accuracy is the share that the attack succeeds with.
    shown = Dataset(inputs=triggered.inputs[others], labels=triggered.labels[others])
    if not gallery.views.terms.roles.aggregator.personal:
        network = gallery.views.terms.network
        owner = as_client(network, gallery.state.model or network.full_spec())
        return {"backdoor": gallery.metrics(owner, shown)["accuracy"]}
    return {"backdoor": _mean([gallery.metrics(owner, shown)["accuracy"] for owner in result.own.values()])}


def _over_link(row: ClientRow) -> bool:
    return bool(row.planned_peak_bytes) and _beyond_links(row, row.bytes_down, row.bytes_up)


def _beyond_links(row: ClientRow, bytes_down: int, bytes_up: int) -> bool:
    moved = ((bytes_down, row.downlink_budget_bytes), (bytes_up, row.uplink_budget_bytes))
    return any(link_bytes is not None and moved_bytes > link_bytes for moved_bytes, link_bytes in moved)


def _plain(row: ClientRow) -> dict[str, Any]:
    names = ("client_id", "spec", "status", "planned_peak_bytes", "budget_bytes", "downlink_budget_bytes")
    more = ("uplink_budget_bytes", "update_bytes", "bytes_down", "bytes_up", "sample_count", "loss")
    return {
        **{name: getattr(row, name) for name in (*names, *more)},
        "macs": row.training_macs,
        "utilisation": row.utilisation,
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
