"""Writes the samples, logs and profiles of an emulated fleet into a folder, for its server and client processes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from subfleet import tasks
from subfleet.device_profiles import write_log
from subfleet.device_profiles.profiles import format_profile
from subfleet.device_profiles.replay import rotate_log
from subfleet.emulation.gathering import GatheredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of an emulated fleet.

    Attributes:
        test: evaluation data of the server.
        clients: training samples by client.
        held_out: held-out samples by client, for clients that have any.
        logs: resource log by client.
        profiles: device profile by client, without a declared architecture or network.
    """

    test: Path
    clients: Mapping[str, Path]
    held_out: Mapping[str, Path]
    logs: Mapping[str, Path]
    profiles: Mapping[str, Path]


def write_files(gathered: GatheredRun, folder: Path) -> Files:
    """Write samples to `data/`, logs to `logs/` and device profiles to `profiles/`.

    Raises:
        FileError: a file cannot be written.
    """
    data, logs, profiles = folder / "data", folder / "logs", folder / "profiles"
    for subfolder in (data, logs, profiles):
        subfolder.mkdir(parents=True, exist_ok=True)
    test = data / "test.npz"
    tasks.write_npz(test, gathered.evaluation)
    clients = {device.client_id: data / f"{device.client_id}.npz" for device in gathered.devices}
    held_out = {
        device.client_id: data / f"{device.client_id}.held-out.npz"
        for device in gathered.devices
        if device.test is not None
    }
    replayed = {device.client_id: logs / f"{device.client_id}.csv" for device in gathered.devices}
    described = {device.client_id: profiles / f"{device.client_id}.toml" for device in gathered.devices}
    for device in gathered.devices:
        tasks.write_npz(clients[device.client_id], device.data)
        if device.test is not None:
            tasks.write_npz(held_out[device.client_id], device.test)
        write_log(replayed[device.client_id], rotate_log(device.log, device.log_start))
        profile = replace(device.profile, architecture=None, network="")
        described[device.client_id].write_text(format_profile(profile), encoding="utf-8")
    return Files(test=test, clients=clients, held_out=held_out, logs=replayed, profiles=described)
