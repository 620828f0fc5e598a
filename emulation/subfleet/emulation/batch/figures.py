"""The figures of a batch run as plain data: those of every run, its rounds, and the success of attacks."""

import math
from dataclasses import replace
from typing import Any

from safetensors.torch import load

from subfleet.aggregation.devices import compute_device
from subfleet.aggregation.views import imitate_client
from subfleet.elastic.model_state import unpack_state
from subfleet.emulation.batch.run import BatchResult
from subfleet.emulation.gathering import GatheredRun
from subfleet.emulation.poisoning import add_trigger
from subfleet.journal.records import ClientRow, RoundRecord
from subfleet.protocol.errors import RunError
from subfleet.reporting.run_figures import Gallery, compute_figures
from subfleet.serving.run_context import create_context
from subfleet.settings.fleet import Backdoor
from subfleet.tasks import Dataset


def compute_batch_figures(gathered: GatheredRun, result: BatchResult) -> dict[str, Any]:
    """The figures of a run: `compute_figures`, `compute_attack_figures`, turns, and rounds with a row for each client.

    Raises:
        RunError: no round was aggregated, so there is no model.
    """
    if not result.model:
        raise RunError("no round of the run aggregated an update, so there is no model to evaluate")
    context = create_context(gathered.run, gathered.run.name)
    model = unpack_state(load(result.model)).to(compute_device(context.config.device))
    gallery = Gallery(context, model, gathered.samples, result.own)
    tiers = {client.client_id: client.tier for client in gathered.devices}
    return {
        **compute_figures(gallery, replace(result.result, rounds=result.rounds), tiers),
        **compute_attack_figures(gallery, gathered),
        "turns": result.turns,
        "rounds": [_build_round(record) for record in result.rounds],
    }


def compute_attack_figures(gallery: Gallery, gathered: GatheredRun) -> dict[str, float]:
    """`backdoor`, the success of a backdoor attack; empty if no client has one.

    It is the fraction of evaluation samples of other classes that the model assigns to the target class once they have
    the trigger; for personalised models, it is the mean over clients.
    """
    target = next((device.attack.target for device in gathered.devices if isinstance(device.attack, Backdoor)), None)
    if target is None:
        return {}
    triggered = add_trigger(gallery.samples, target, 1.0, seed=0)
    others = gallery.samples.labels != target
    # All are labelled with the target class, so accuracy is the success rate of the attack.
    shown = Dataset(inputs=triggered.inputs[others], labels=triggered.labels[others])
    owners = list(gallery.own.values())
    if not gallery.context.roles.aggregator.personal:
        network = gallery.context.network
        owners = [imitate_client(network, gallery.state.model or network.full_architecture())]
    rates = [gallery.metrics(owner, shown)["accuracy"] for owner in owners]
    return {"backdoor": math.fsum(rates) / len(rates) if rates else 0.0}


def _build_round(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.round,
        "accuracy": record.accuracy,
        **record.metrics,
        "loss": record.loss,
        "log_time_s": record.log_time_s,
        "participation": record.participation,
        "left_out": record.left_out,
        "idle": dict(record.idle),
        "clients": [_build_row(row) for row in record.clients],
    }


def _build_row(row: ClientRow) -> dict[str, Any]:
    names = ("client_id", "architecture", "status", "planned_peak_bytes", "budget_bytes", "downlink_budget_bytes")
    more = ("uplink_budget_bytes", "update_bytes", "bytes_down", "bytes_up", "sample_count", "loss")
    return {
        **{name: getattr(row, name) for name in (*names, *more)},
        "macs": row.training_macs,
        "utilisation": row.utilisation,
    }
