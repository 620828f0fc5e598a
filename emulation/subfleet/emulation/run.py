"""Runs an experiment on this machine: broker, server, client processes, then the folder of results."""

import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subfleet.device_profiles import demo_log_path
from subfleet.emulation.experiments import EmulatedDevice, Experiment
from subfleet.emulation.fleet import ClientCommand, Fleet
from subfleet.emulation.predictions import accuracies
from subfleet.emulation.slices import Slices, cut
from subfleet.export.pool import ExportPool
from subfleet.journal.records import DeployedModel, RunObserver, RunResult
from subfleet.link.broker import EmbeddedBroker
from subfleet.link.watch import Watch
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.errors import RunError, SubfleetError
from subfleet.protocol.topics import Topics
from subfleet.reporting.results import write_results
from subfleet.serving.observing import GuardedObserver
from subfleet.serving.session import Server
from subfleet.settings.config import LogClock, ServerConfig
from subfleet.transport.address import BrokerAddress, mqtt_client_id, parse_url
from subfleet.transport.claiming import ClaimingTransport, server_place
from subfleet.transport.mqtt import MqttTransport

__all__ = ["Outcome", "run_experiment", "server_config"]

LEAVE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an experiment left behind.

    Attributes:
        accuracy: of the full model on the held-out samples.
        folder: with summary.json, rounds.csv, clients.csv, report.html, the logs and the models.
        report: the page to look at.
        models: one entry per device and model file: its subnet, its difference from PyTorch, its own accuracy.
    """

    accuracy: float
    folder: Path
    report: Path
    models: tuple[dict[str, Any], ...]


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    observer: RunObserver,
    stop: threading.Event,
    exports: ExportPool,
    broker: BrokerAddress | None = None,
) -> Outcome:
    """Run an experiment to its end, with one process per client.

    Args:
        experiment: what to run.
        folder: for the results; a run that was interrupted there is taken up.
        observer: is told what happens; it may fail, and the run goes on.
        stop: set it to end the run early.
        exports: where programs and models are written; the caller closes it.
        broker: where one is that is there already; by default an embedded one is started.

    Raises:
        RunError: a client failed, the run was stopped before its end, or a device's own model cannot be had; in the
            last case the run's results are in the folder all the same.
        TransportError: the broker is not there.
    """
    observer = GuardedObserver(observer)
    with ExitStack() as stack:
        devices = len(experiment.devices)
        observer.say(f"Cutting {experiment.dataset} into {devices} slices (Dirichlet {experiment.alpha:g})")
        slices = cut(experiment, folder / "data")
        logs = _copy_logs(experiment, folder / "logs")
        embedded, address = None, broker
        if address is None:
            embedded = stack.enter_context(EmbeddedBroker())
            address = parse_url(embedded.url)
        observer.say(f"Broker at {address.where}; starting {devices} client processes")
        commands = tuple(_command(device, address, slices, logs, folder) for device in experiment.devices)
        fleet = stack.enter_context(Fleet(commands, output_folder=folder / "output"))
        watch = stack.enter_context(Watch([fleet.check, *([embedded.start] if embedded else [])], stop))
        config = server_config(experiment, slices.test)
        transport = MqttTransport(address, mqtt_client_id(config.fleet, "server", config.name))
        place = server_place(Topics(config.fleet), config.name)
        server = Server(
            config,
            ClaimingTransport(transport, place, tell=observer.say),
            observer,
            state_folder=folder / "server",
            exports=exports,
        )
        result = server.run(stop)
        watch.raise_failure()
        if not result.finished:
            raise RunError(f"the run was stopped before its end; start it again with --name {folder.name} to go on")
        stack.callback(fleet.wait, LEAVE_S)  # clients hear of the end, and leave, while their models are tried
        return _collect(folder, result, slices, observer)


def server_config(experiment: Experiment, evaluation_data: Path) -> ServerConfig:
    """The server's side of an experiment: every client takes part in every round, logs give the time."""
    return ServerConfig(
        name=experiment.name,
        model=experiment.model,
        evaluation_data=str(evaluation_data),
        rounds=experiment.rounds,
        min_clients=len(experiment.devices),
        training=experiment.training,
        learning_rate_decay=experiment.learning_rate_decay,
        # Blocks are left out, too, so that the devices differ in depth as well as in width.
        method=HeteroFL(weighting="samples", class_mask=False, depth=True),
        rates=experiment.rates,
        seed=experiment.seed,
        communication_s=experiment.communication_s,
        clock=LogClock(start_s=0.0, step_s=experiment.log_step_s),
    )


def _copy_logs(experiment: Experiment, folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    logs = {device.client_id: folder / f"{device.client_id}.csv" for device in experiment.devices}
    for device in experiment.devices:
        shutil.copyfile(demo_log_path(device.log), logs[device.client_id])
    return logs


def _command(
    device: EmulatedDevice, broker: BrokerAddress, slices: Slices, logs: Mapping[str, Path], folder: Path
) -> ClientCommand:
    return ClientCommand(
        client_id=device.client_id,
        broker=broker,
        data=slices.clients[device.client_id],
        profile=device.profile,
        log=logs[device.client_id],
        state=_state_folder(folder, device.client_id),
        runtime=device.runtime,
        architecture=device.architecture,
    )


def _state_folder(folder: Path, client_id: str) -> Path:
    return folder / "devices" / client_id


def _collect(folder: Path, result: RunResult, slices: Slices, observer: RunObserver) -> Outcome:
    if result.model_path is None:
        raise RunError(
            "no round of the run folded an update, so there is no model; see the reasons in the tables above"
        )
    shutil.copyfile(result.model_path, folder / "model.safetensors")
    observer.say("Loading each device's own model in a fresh process")
    try:
        models = _own_models(folder, result, slices)
    except SubfleetError:
        # A model that cannot be shown is no reason to lose a run.
        write_results(folder, name=folder.name, result=result)
        raise
    report = write_results(folder, name=folder.name, result=result, extra={"models": list(models)})
    return Outcome(accuracy=result.accuracy, folder=folder, report=report, models=models)


def _own_models(folder: Path, result: RunResult, slices: Slices) -> tuple[dict[str, Any], ...]:
    files = [_fetched(folder, result.run_id, model) for model in result.deployed]
    own = accuracies(files, slices.test)
    return tuple(
        {
            "client_id": model.client_id,
            "file": str(path.relative_to(folder)),
            "target": model.target,
            "spec": model.spec,
            "bytes": path.stat().st_size,
            "max_abs_diff": model.max_abs_diff,
            "quantised_accuracy": model.quantised_accuracy,
            "float_accuracy": model.float_accuracy,
            "accuracy": accuracy,
        }
        for model, path, accuracy in zip(result.deployed, files, own, strict=True)
    )


def _fetched(folder: Path, run_id: str, model: DeployedModel) -> Path:
    """Copy the model file that the device itself has fetched to where people look for it."""
    fetched = _state_folder(folder, model.client_id) / "models" / run_id / f"model{model.path.suffix}"
    if model.status != "deployed" or not fetched.exists():
        raise RunError(f"{model.client_id} has not fetched its {model.target} model: {model.status}")
    kept = folder / "models" / model.client_id / fetched.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(fetched, kept)
    return kept
