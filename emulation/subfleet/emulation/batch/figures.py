"""The figures of a virtual run, with its rounds and with what an attack came to, as plain data."""

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
from subfleet.settings.attacks import Backdoor
from subfleet.tasks import Dataset


def compute_batch_figures(experiment: GatheredRun, result: BatchResult) -> dict[str, Any]:
    """The figures of a run: `run_figures`, `attack_figures`, its turns, and each round with a row per client.

    Raises:
        RunError: no round aggregated anything, so that there is no model.
    """
    if not result.model:
        raise RunError("no round of the run aggregated an update, so there is no model to evaluate")
    context = create_context(experiment.run, experiment.run.name)
    model = unpack_state(load(result.model)).to(compute_device(context.config.device))
    gallery = Gallery.of(context, model, experiment.samples, result.own)
    tiers = {client.client_id: client.tier for client in experiment.devices}
    return {
        **compute_figures(gallery, replace(result.result, rounds=result.rounds), tiers),
        **compute_attack_figures(gallery, experiment),
        "turns": result.turns,
        "rounds": [_round(record) for record in result.rounds],
    }


def compute_attack_figures(gallery: Gallery, experiment: GatheredRun) -> dict[str, float]:
    """`backdoor`, where clients teach a trigger; nothing else.

    It is the fraction of the server's samples of other classes that the model takes for the trigger's once they have
    it; of models that clients have, the mean.
    """
    target = next((one.attack.target for one in experiment.devices if isinstance(one.attack, Backdoor)), None)
    if target is None:
        return {}
    triggered = add_trigger(gallery.samples, target, 1.0, seed=0)
    others = gallery.samples.labels != target
    # All of them are labelled with the target, so that accuracy is the share that the attack succeeds with.
    shown = Dataset(inputs=triggered.inputs[others], labels=triggered.labels[others])
    owners = list(gallery.own.values())
    if not gallery.views.context.roles.aggregator.personal:
        network = gallery.views.context.network
        owners = [imitate_client(network, gallery.state.model or network.full_architecture())]
    shares = [gallery.metrics(owner, shown)["accuracy"] for owner in owners]
    return {"backdoor": math.fsum(shares) / len(shares) if shares else 0.0}


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


def _plain(row: ClientRow) -> dict[str, Any]:
    names = ("client_id", "architecture", "status", "planned_peak_bytes", "budget_bytes", "downlink_budget_bytes")
    more = ("uplink_budget_bytes", "update_bytes", "bytes_down", "bytes_up", "sample_count", "loss")
    return {
        **{name: getattr(row, name) for name in (*names, *more)},
        "macs": row.training_macs,
        "utilisation": row.utilisation,
    }
