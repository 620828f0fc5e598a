"""Runs an emulated fleet with a process for each client, and writes the results."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from subfleet.emulation.client_groups import open_groups
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
from subfleet.serving.deployment import serve_run
from subfleet.serving.outcome import Outcome, collect_gallery, write_outcome
from subfleet.settings.fleet import DeviceSettings
from subfleet.settings.named_networks import declare_network
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
    """Run an emulated fleet to the end, with a process for each client.

    Args:
        run: its settings.
        folder: for the results; an interrupted run in it is resumed.
        observer: of the run; its errors do not affect the run.
        stop: set it to stop the run.
        exports: the exporter; it is not closed.
        broker: None starts an embedded one.

    Raises:
        ConfigError: a device has an attack.
        RunError: a client failed, the run was stopped before its end, or a device's model is missing; in the last case
            the other results are written.
        TransportError: the broker is unreachable.
        SubfleetError: the data or devices of the run cannot be read.
    """
    observer = GuardedObserver(observer)
    if attackers := [device.id for device in run.fleet.devices if device.attack is not None]:
        raise ConfigError(
            f"the device {attackers[0]!r} has an attack, but client processes support none; run it with --host batch"
        )
    observer.say(f"Reading the samples and logs of {len(run.fleet.expand_devices())} devices")
    gathered = gather_run(run)
    files = write_files(gathered, folder)

    @contextmanager
    def clients(address: BrokerAddress) -> Iterator[Sequence[Callable[[], None]]]:
        observer.say(f"Broker at {address.host_and_port}; starting {len(files.clients)} client processes")
        commands = tuple(
            replace(_build_command(device, address, files, folder, run), groups=groups.folders.get(device.id, ()))
            for device in run.fleet.expand_devices()
        )
        with ClientProcesses(commands, output_folder=folder / "output") as fleet:
            yield [fleet.check]
            fleet.wait(LEAVE_S)  # clients leave while their models are evaluated

    data = replace(run.data, test=str(files.test), test_samples=0)
    emulated = replace(run, data=data, outliers=run.outliers.for_emulation(attacked=False))
    served = partial(serve_run, exports=exports, clients=clients, broker=broker, samples=gathered.evaluation)
    tiers = {device.client_id: device.tier for device in gathered.devices}
    threads = {device.client_id: device.profile.threads for device in gathered.devices}
    with open_groups(threads) as groups, served(emulated, folder, observer, stop) as (server, result):
        return write_outcome(
            folder,
            replace(result, memory_limit=groups.memory_limit),
            observer,
            figures=lambda: compute_figures(collect_gallery(server), result, tiers),
            trial=lambda models: evaluate_models(models, files.test),
            file_of=lambda model: find_fetched_model(folder, result.run_id, model),
        )


def _build_command(
    device: DeviceSettings, broker: BrokerAddress, files: Files, folder: Path, run: Run
) -> ClientCommand:
    declares = "" if device.architecture is None else canonical_json(device.architecture).decode()
    if device.network is not None:
        declares = declare_network(device.network, run.networks)
    return ClientCommand(
        client_id=device.id,
        broker=broker,
        fleet=run.fleet.name,
        data=files.clients[device.id],
        profile=str(files.profiles[device.id]) if device.population or device.disk_limit else device.profile,
        log=files.logs[device.id],
        state=_state_folder(folder, device.id),
        runtime=device.runtime,
        declares=declares,
        held_out=files.held_out.get(device.id),
        durations=run.host.durations,
        binds_memory=True,
    )


def _state_folder(folder: Path, client_id: str) -> Path:
    return folder / "devices" / client_id


def find_fetched_model(folder: Path, run_id: str, model: DeployedModel) -> Path:
    """The path of the model file that a device has fetched.

    Args:
        folder: of the run.
        run_id: of the run.
        model: as the server deployed it.

    Raises:
        RunError: the device has not fetched it.
    """
    fetched = _state_folder(folder, model.client_id) / "models" / run_id / f"model{model.path.suffix}"
    if model.status != "deployed" or not fetched.exists():
        raise RunError(f"{model.client_id} has not fetched its {model.target} model: {model.status}")
    return fetched
