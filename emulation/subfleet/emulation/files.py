"""What client processes and a server read of an emulated fleet, written into a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet import tasks
from subfleet.device_profiles import write_log
from subfleet.emulation.gathered import GatheredRun

__all__ = ["Files", "written"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where everything is.

    Attributes:
        test: the server's held-out samples.
        clients: each client's own samples.
        logs: each client's resource log.
    """

    test: Path
    clients: Mapping[str, Path]
    logs: Mapping[str, Path]


def written(gathered: GatheredRun, folder: Path) -> Files:
    """Write samples to `data/` and logs to `logs/`.

    Raises:
        FileError: a file cannot be written.
    """
    data, logs = folder / "data", folder / "logs"
    for place in (data, logs):
        place.mkdir(parents=True, exist_ok=True)
    test = data / "test.npz"
    tasks.write_npz(test, gathered.evaluation)
    clients = {device.client_id: data / f"{device.client_id}.npz" for device in gathered.devices}
    replayed = {device.client_id: logs / f"{device.client_id}.csv" for device in gathered.devices}
    for device in gathered.devices:
        tasks.write_npz(clients[device.client_id], device.data)
        write_log(replayed[device.client_id], device.log)
    return Files(test=test, clients=MappingProxyType(clients), logs=MappingProxyType(replayed))
