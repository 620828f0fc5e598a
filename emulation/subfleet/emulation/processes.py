"""Runs an emulated fleet as processes: broker, server, one for each client; then the folder of results."""

import logging
import shutil
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from subfleet.emulation.files import Files, written
from subfleet.emulation.fleet import ClientCommand, Fleet
from subfleet.emulation.gathering import gathered
from subfleet.emulation.outcome import Outcome
from subfleet.emulation.predictions import predictions
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import DeployedModel, RunObserver, RunResult
from subfleet.link.broker import EmbeddedBroker
from subfleet.link.watch import Watch
from subfleet.protocol.errors import ConfigError, RunError, SubfleetError
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.topics import Topics
from subfleet.reporting.own_models import kept_models, tried
from subfleet.reporting.results import write_results
from subfleet.serving.broker import try_broker
from subfleet.serving.session import Server
from subfleet.settings.fleet import DeviceSettings
from subfleet.settings.kept import MODEL, SUPERNET
from subfleet.settings.run import Run
from subfleet.transport.address import BrokerAddress, mqtt_client_id, parse_url
from subfleet.transport.chunk_sizes import KNOWN_BROKERS, ChunkSizes, KnownBroker
from subfleet.transport.claiming import ClaimingTransport, server_place
from subfleet.transport.complaints import Complaints
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.rating import RatedTransport

__all__ = ["run_processes"]

_LOG = logging.getLogger(__name__)

LEAVE_S = 20.0


def run_processes(
    run: Run,
    folder: Path,
    observer: RunObserver,
    stop: threading.Event,
    *,
    exports: ExportPool,
    broker: BrokerAddress | None = None,
) -> Outcome:
    """Run an emulated fleet to the run's end, with one process per client.

    Args:
        run: what to run; every device of its fleet is emulated.
        folder: for the results; a run that was interrupted there is taken up.
        observer: is told what happens; it may fail, and the run goes on.
        stop: set it to end the run early.
        exports: where programs and models are written; the caller closes it.
        broker: where one is that is there already; by default an embedded one is started.

    Raises:
        ConfigError: a device is to attack.
        RunError: a client failed, the run was stopped before its end, or a device's own model cannot be had; in the
            last case the run's results are in the folder all the same.
        TransportError: the broker is not there.
        SubfleetError: what the run says of data and devices cannot be had.
    """
    observer = GuardedObserver(observer)
    _refuse_attacks(run)
    with ExitStack() as stack:
        observer.say(f"Reading the samples and logs of {len(run.fleet.each())} devices")
        files = written(gathered(run), folder)
        embedded, address = None, broker
        if address is None:
            embedded = stack.enter_context(EmbeddedBroker())
            address = parse_url(embedded.url)
        observer.say(f"Broker at {address.where}; starting {len(files.clients)} client processes")
        commands = tuple(_command(device, address, files, folder, run) for device in run.fleet.each())
        fleet = stack.enter_context(Fleet(commands, output_folder=folder / "output"))
        watch = stack.enter_context(Watch([fleet.check, *([embedded.start] if embedded else [])], stop))
        transport = MqttTransport(address, mqtt_client_id(run.fleet.name, "server", run.name))
        topics = Topics(run.fleet.name)
        claiming = ClaimingTransport(transport, server_place(topics, run.name), tell=observer.say)
        sizes = ChunkSizes.remembered(KnownBroker(folder / "server" / KNOWN_BROKERS, address.where))
        server = Server(
            _served(run, files),
            RatedTransport(claiming, topics, Complaints(_LOG).note),
            observer,
            state_folder=folder / "server",
            exports=exports,
            sizes=sizes,
        )
        if embedded is None:
            try_broker(address, run, transport, sizes, observer)
        result = server.run(stop)
        watch.raise_failure()
        if not result.finished:
            raise RunError(f"the run was stopped before its end; start it again with --name {folder.name} to go on")
        stack.callback(fleet.wait, LEAVE_S)  # clients hear of the end, and leave, while their models are tried
        return _collect(folder, result, files.test, observer)


def _served(run: Run, files: Files) -> Run:
    """The run as its server is given it: with evaluation data in a file, and without attackers."""
    data = replace(run.data, test=str(files.test), test_samples=0)
    return replace(run, data=data, suspicion=run.suspicion.emulated(attacked=False))


def _refuse_attacks(run: Run) -> None:
    if attackers := [device.id for device in run.fleet.devices if device.attack is not None]:
        raise ConfigError(
            f"the device {attackers[0]!r} has an attack, but client processes know none; run it with --host batch"
        )


def _command(device: DeviceSettings, broker: BrokerAddress, files: Files, folder: Path, run: Run) -> ClientCommand:
    return ClientCommand(
        client_id=device.id,
        broker=broker,
        fleet=run.fleet.name,
        data=files.clients[device.id],
        profile=str(files.profiles[device.id]) if device.population or device.disk_limit else device.profile,
        log=files.logs[device.id],
        state=_state_folder(folder, device.id),
        runtime=device.runtime,
        declares=_declared(device),
        held_out=files.held_out.get(device.id),
    )


def _declared(device: DeviceSettings) -> str:
    declared = device.network or device.architecture
    return "" if declared is None else canonical_json(declared).decode()


def _state_folder(folder: Path, client_id: str) -> Path:
    return folder / "devices" / client_id


def _collect(folder: Path, result: RunResult, test: Path, observer: RunObserver) -> Outcome:
    if result.model_path is None:
        raise RunError(
            "no round of the run folded an update, so there is no model; see the reasons in the tables above"
        )
    shutil.copyfile(result.model_path, folder / MODEL)
    if result.supernet_path is not None:
        shutil.copyfile(result.supernet_path, folder / SUPERNET)
    observer.say("Loading each device's own model in a fresh process")
    try:
        models = _own_models(folder, result, test)
    except SubfleetError:
        # A model that cannot be shown is no reason to lose a run.
        write_results(folder, name=folder.name, result=result)
        raise
    report = write_results(folder, name=folder.name, result=result, extra={"models": list(models)})
    return Outcome(result=result, folder=folder, report=report, models=models)


def _own_models(folder: Path, result: RunResult, test: Path) -> tuple[dict[str, Any], ...]:
    fetched = [(model, _fetched(folder, result.run_id, model)) for model in result.deployed]
    models = kept_models(folder, fetched)
    own = predictions([folder / model["file"] for model in models], test)
    return tuple(tried(model, found.metric, found.value) for model, found in zip(models, own, strict=True))


def _fetched(folder: Path, run_id: str, model: DeployedModel) -> Path:
    """The model file that the device itself has fetched."""
    fetched = _state_folder(folder, model.client_id) / "models" / run_id / f"model{model.path.suffix}"
    if model.status != "deployed" or not fetched.exists():
        raise RunError(f"{model.client_id} has not fetched its {model.target} model: {model.status}")
    return fetched
