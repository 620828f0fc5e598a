"""Reads the data and devices of a run: every profile, log and sample of its emulated fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from subfleet.device.describing import make_profile
from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog, load_log, load_profile
from subfleet.device_profiles.drawing import PopulationDevice, draw_devices
from subfleet.device_profiles.populations import load_population
from subfleet.emulation.partitions import partition
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.messages import Profile
from subfleet.protocol.readings import Reading
from subfleet.settings.fleet import Attack, DeviceSettings
from subfleet.settings.named_networks import declare_network
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.tasks.data_form import fit_to_form
from subfleet.tasks.measuring import measure_inputs
from subfleet.tasks.named_dataset import DATASETS
from subfleet.tasks.source_files import find_data_folders


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """One device of an emulated fleet.

    Attributes:
        client_id: its name in tables and topics.
        profile: its device profile. The profile's fraction of free memory determines the client's memory budget, and
            the profile's architecture is the one that the client declares.
        data: its training samples.
        log: the resource log that it replays, read at the log time that each round announces. Devices may share it.
        log_start: the row of the log at which its time begins, counted from 0.
        runtime: the program target that it runs.
        test: its held-out samples, on which it evaluates its own submodel; None skips the evaluation.
        tier: the kind of device by which results are grouped.
        attack: how it falsifies its updates; None for an honest client.
    """

    client_id: str
    profile: DeviceProfile
    data: Dataset
    log: ResourceLog
    log_start: int = 0
    runtime: str = "onnx"
    test: Dataset | None = None
    tier: str = ""
    attack: Attack | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRun:
    """A run of an emulated fleet, with its data and devices.

    Attributes:
        run: its settings; `devices` and `evaluation` replace the devices and data in them.
        devices: one or more, with different ids.
        evaluation: the server's evaluation and validation samples.

    Raises:
        ConfigError: ids repeat, there are fewer devices than a round needs, or the run has no logical clock.
    """

    run: Run
    devices: tuple[EmulatedDevice, ...]
    evaluation: Dataset

    @property
    def samples(self) -> Dataset:
        """The evaluation data without validation samples."""
        count = self.run.data.validation_samples
        return self.evaluation.split_off(count)[0] if count else self.evaluation

    def __post_init__(self) -> None:
        names = [device.client_id for device in self.devices]
        if len(set(names)) != len(names):
            repeated = sorted(name for name in set(names) if names.count(name) > 1)
            raise ConfigError(f"the client ids {repeated} are used more than once; give each client an id of its own")
        if len(names) < self.run.min_clients:
            raise ConfigError(
                f"there are {len(names)} clients, but a round needs {self.run.min_clients}; add devices to the fleet, "
                "or lower min_clients"
            )
        if self.run.clock is None:
            raise ConfigError("clock is missing, but emulated devices replay logs; add a table [clock]")


def gather_run(run: Run) -> GatheredRun:
    """Read the data, profiles and logs of an emulated fleet. The same run always gives the same result.

    Raises:
        ConfigError: the run has no devices, the data set is unknown, or it cannot be partitioned as requested.
        DataError: a data set is damaged, or cannot be used.
        FileError: a file is missing or cannot be read.
        TransportError: a data set has to be downloaded, and its address is unreachable.
        MissingExtraError: a package that the data or the partition needs is not installed.
    """
    without_data = [device.id for device in run.emulated_devices() if not device.data]
    parts, evaluation = _partition_data(run, without_data)
    devices = []
    for settings in run.fleet.devices:
        for device, (drawn, log_start) in zip(settings.expand(), _load_devices(run, settings), strict=True):
            data = _read(run, device.data) if device.data else parts[device.id]
            devices.append(replace(_build_device(run, device, drawn, data), log_start=log_start))
    return GatheredRun(run=run, devices=tuple(devices), evaluation=evaluation)


def _load_devices(run: Run, settings: DeviceSettings) -> Sequence[tuple[PopulationDevice, int]]:
    """The profile and the log of each device that a table of settings describes, and the row at which it begins."""
    if not settings.population:
        profile = load_profile(settings.profile)
        log = _make_steady_log(settings.steady, profile.name) if settings.steady else load_log(settings.log)
        count = settings.count
        # Devices of one table start at evenly spaced rows of the same log.
        device = PopulationDevice(profile=profile, log=log)
        return [(device, number * len(log.rows) // count) for number in range(count)]
    population, folder = load_population(settings.population), find_data_folders().given
    devices = draw_devices(population, settings.count, seed=f"{run.seed}/{settings.id}", data=folder)
    if not settings.steady:
        return [(device, 0) for device in devices]
    return [(replace(one, log=_make_steady_log(settings.steady, one.profile.name)), 0) for one in devices]


def _make_steady_log(reading: Reading, device: str) -> ResourceLog:
    rows = (LogRow(t_s=0.0, reading=reading),)
    return ResourceLog(device=device, source="set in the run's file", licence="none", rows=rows)


def _build_device(run: Run, settings: DeviceSettings, drawn: PopulationDevice, data: Dataset) -> EmulatedDevice:
    profile = drawn.profile
    if settings.architecture is not None:
        profile = replace(profile, architecture=settings.architecture, network="")
    if settings.network is not None:
        profile = replace(profile, architecture=None, network=declare_network(settings.network, run.networks))
    if settings.disk_limit:
        profile = replace(profile, disk_limit=settings.disk_limit)
    train, test = _hold_out(data, run.data.held_out, f"{run.seed}/{settings.id}")
    return EmulatedDevice(
        client_id=settings.id,
        profile=profile,
        data=train,
        log=drawn.log,
        runtime=settings.runtime,
        test=test,
        tier=settings.tier or profile.name,
        attack=settings.attack,
    )


def _partition_data(run: Run, names: Sequence[str]) -> tuple[Mapping[str, Dataset], Dataset]:
    """The samples of each named device, which has no data of its own, and the evaluation data."""
    evaluation = _read(run, run.data.evaluated_on)
    evaluation = evaluation.take(np.arange(min(run.data.test_samples or len(evaluation), len(evaluation))))
    if not names:
        return {}, evaluation
    train = _read_training_data(run, names[0])
    if 0 < run.data.samples < len(train):
        drawn = np.random.default_rng(run.seed).permutation(len(train))[: run.data.samples]
        train = train.take(np.sort(drawn))
    train, evaluation = _standardise(run.data, train, evaluation)
    parts = partition(train, run.data.partition, clients=len(names), seed=run.seed)
    return {name: train.take(indices) for name, indices in zip(names, parts, strict=True)}, evaluation


def _read_training_data(run: Run, needed_by: str) -> Dataset:
    if run.data.train:
        return _read(run, run.data.train)
    if not run.data.name:
        raise ConfigError(
            f"data.name and data.train are empty, but the device {needed_by!r} has no samples of its own; set one of "
            "them, or the device's data"
        )
    return fit_to_form(DATASETS.load(run.data.name).load().train, _build_form(run), f"{run.data.name}:train")


def _read(run: Run, source: str) -> Dataset:
    return read_dataset(source, _build_form(run))


def _build_form(run: Run) -> DataForm:
    """The form of samples that the model takes. Classes are left open: server and clients agree on them later."""
    numbers = not run.training.objective.kind.over_classes
    return DataForm(
        input_shape=run.model.input_shape,
        classes=None,
        label_shape=run.label_shape if numbers else None,
        targets=numbers,
        transform=run.data.transform,
    )


def _standardise(settings: DataSettings, train: Dataset, evaluation: Dataset) -> tuple[Dataset, Dataset]:
    if not settings.standardise:
        return train, evaluation
    if train.inputs.dtype != np.float32:
        raise ConfigError(f"data.standardise is set, but inputs are {train.inputs.dtype} and not float32; leave it out")
    mean, deviation = train.inputs.mean(), train.inputs.std()

    def scale(data: Dataset) -> Dataset:
        return replace(data, inputs=((data.inputs - mean) / deviation).astype(np.float32))

    return scale(train), scale(evaluation)


def _hold_out(data: Dataset, fraction: float, stream: str) -> tuple[Dataset, Dataset | None]:
    """The training and the held-out samples of a device; `stream` seeds the draw."""
    if not fraction:
        return data, None
    order = np.random.default_rng(list(stream.encode())).permutation(len(data))
    count = max(1, round(fraction * len(data)))
    return data.take(np.sort(order[count:])), data.take(np.sort(order[:count]))


def build_profile(client: EmulatedDevice) -> Profile:
    """The profile that a client of a batch announces to the server."""
    summary = replace(client.data.summary(), inputs=measure_inputs(client.data))
    held_out = None if client.test is None else client.test.summary()
    session_id = f"{client.client_id}-1"
    return make_profile(client.client_id, session_id, client.profile, client.runtime, summary, held_out)
