"""Runs an emulated fleet as processes: broker, server, one for each client; then the folder of results."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from subfleet.emulation.client_processes import ClientCommand, ClientProcesses
from subfleet.emulation.files import Files, write_files
from subfleet.emulation.gathering import gather_run
from subfleet.emulation.predictions import evaluate_models
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import DeployedModel, RunObserver
from subfleet.protocol.errors import ConfigError, RunError
from subfleet.protocol.schema import canonical_json
from subfleet.reporting.run_figures import compute_figures
from subfleet.serving.deployment import Deployment, serve_run
from subfleet.serving.outcome import Outcome, collect_gallery, write_outcome
from subfleet.settings.fleet import DeviceSettings
from subfleet.settings.run import Run
from subfleet.transport.address import BrokerAddress

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
    observer.say(f"Reading the samples and logs of {len(run.fleet.each())} devices")
    gathering = gather_run(run)
    files = write_files(gathering, folder)

    @contextmanager
    def clients(address: BrokerAddress) -> Iterator[Sequence[Callable[[], None]]]:
        observer.say(f"Broker at {address.where}; starting {len(files.clients)} client processes")
        commands = tuple(_command(device, address, files, folder, run) for device in run.fleet.each())
        with ClientProcesses(commands, output_folder=folder / "output") as fleet:
            yield [fleet.check]
            fleet.wait(LEAVE_S)  # clients hear of the end, and leave, while their models are tried

    deployment = Deployment(
        run=_served(run, files),
        folder=folder,
        exports=exports,
        clients=clients,
        broker=broker,
        samples=gathering.evaluation,
    )
    tiers = {device.client_id: device.tier for device in gathering.devices}
    with serve_run(deployment, observer, stop) as (server, result):
        return write_outcome(
            folder,
            result,
            observer,
            figures=lambda: compute_figures(collect_gallery(server), result, tiers),
            trial=lambda models: evaluate_models(models, files.test),
            file_of=lambda model: find_fetched_model(folder, result.run_id, model),
        )


def _served(run: Run, files: Files) -> Run:
    """The run as its server is given it: with evaluation data in a file, and without attackers."""
    data = replace(run.data, test=str(files.test), test_samples=0)
    return replace(run, data=data, outliers=run.outliers.emulated(attacked=False))


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


def find_fetched_model(folder: Path, run_id: str, model: DeployedModel) -> Path:
    """The model file that the device itself has fetched."""
    fetched = _state_folder(folder, model.client_id) / "models" / run_id / f"model{model.path.suffix}"
    if model.status != "deployed" or not fetched.exists():
        raise RunError(f"{model.client_id} has not fetched its {model.target} model: {model.status}")
    return fetched
