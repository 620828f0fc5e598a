"""Reads what a run says of data and devices: every profile, log and sample of its emulated fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog, load_log, load_profile
from subfleet.device_profiles.drawing import PopulationDevice, draw_devices
from subfleet.device_profiles.populations import load_population
from subfleet.device_profiles.replay import rotate_log
from subfleet.emulation.partitions import partition
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import canonical_json
from subfleet.settings.attacks import Attack
from subfleet.settings.fleet import DeviceSettings
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.tasks.data_form import fit_to_form
from subfleet.tasks.named_dataset import DATASETS
from subfleet.tasks.source_files import find_data_folders
from subfleet.transport.in_memory import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """One device of an emulated fleet.

    Attributes:
        client_id: its name in tables and topics.
        profile: the device profile that it follows; its fraction of free memory is the client's memory budget, and
            its architecture is what the client declares.
        data: its own samples.
        log: the resource log that it replays, read at the time that the round's announcement names.
        runtime: the program target that it runs.
        test: its own held-out samples, on which its own submodel is evaluated; None: it is not.
        tier: the kind of device under which its results are summed up.
        attack: what it does to what it sends; None is an honest client.
    """

    client_id: str
    profile: DeviceProfile
    data: Dataset
    log: ResourceLog
    runtime: str = "onnx"
    test: Dataset | None = None
    tier: str = ""
    attack: Attack | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRun:
    """A run of an emulated fleet.

    Attributes:
        run: its settings. What they say of data and devices was read: `evaluation` and `devices` stand in its place.
        devices: one or more, with different ids.
        evaluation: the server's held-out samples.
        faults: what the transport does to messages in a batch; nothing by default.

    Raises:
        ConfigError: ids repeat, there are fewer devices than a round needs, or there is no logical clock.
    """

    run: Run
    devices: tuple[EmulatedDevice, ...]
    evaluation: Dataset
    faults: Faults = field(default_factory=Faults)

    @property
    def test_samples(self) -> Dataset:
        """Of the server's held-out samples those that all that is told of the model goes by: none for validation."""
        count = self.run.data.validation_samples
        return self.evaluation.split_off(count)[0] if count else self.evaluation

    def __post_init__(self) -> None:
        names = [device.client_id for device in self.devices]
        if len(set(names)) != len(names):
            repeated = sorted(name for name in set(names) if names.count(name) > 1)
            raise ConfigError(f"client ids are {repeated} more than once, but each client needs an id of its own")
        if len(names) < self.run.min_clients:
            raise ConfigError(
                f"there are {len(names)} clients, but a round needs {self.run.min_clients}; add devices to the fleet, "
                "or lower min_clients"
            )
        if self.run.clock is None:
            raise ConfigError("clock is missing, but replayed logs are read by no other time; add a table [clock]")


def gather_run(run: Run) -> GatheredRun:
    """Read everything that an emulated fleet works with. The same run always gives the same.

    Raises:
        ConfigError: the run has no devices, the data set is unknown, or cannot be split so.
        DataError: a data set is damaged, or cannot be used.
        FileError: a file is missing or cannot be read.
        TransportError: a data set has to be downloaded, and its address cannot be reached.
        MissingExtraError: a package that the data or the split need is not installed.
    """
    wanted = run.emulated_devices()
    pieces, evaluation = _pieces(run, [device.id for device in wanted if not device.data])
    devices = []
    for settings in run.fleet.devices:
        for device, taken in zip(settings.each(), _list_profiles(run, settings), strict=True):
            data = _read(run, device.data) if device.data else pieces[device.id]
            devices.append(_device(run, device, taken, data))
    return GatheredRun(run=run, devices=tuple(devices), evaluation=evaluation)


def _list_profiles(run: Run, settings: DeviceSettings) -> Sequence[PopulationDevice]:
    """Profile and log of each of the devices that some settings describe."""
    if settings.population:
        population, folder = load_population(settings.population), find_data_folders().given
        found = draw_devices(population, settings.count, seed=f"{run.seed}/{settings.id}", data=folder)
    else:
        profile = load_profile(settings.profile)
        log = _steady(settings.steady, profile.name) if settings.steady else load_log(settings.log)
        found = tuple(PopulationDevice(profile=profile, log=one) for one in _spread(log, settings.count))
    if not (settings.population and settings.steady):
        return found
    return [replace(one, log=_steady(settings.steady, one.profile.name)) for one in found]


def _steady(reading: Reading, device: str) -> ResourceLog:
    rows = (LogRow(t_s=0.0, reading=reading),)
    return ResourceLog(device=device, source="set in the run's file", licence="none", rows=rows)


def _device(run: Run, settings: DeviceSettings, described: PopulationDevice, data: Dataset) -> EmulatedDevice:
    profile = described.profile
    if settings.architecture is not None:
        profile = replace(profile, architecture=settings.architecture, network="")
    if settings.network is not None:
        profile = replace(profile, architecture=None, network=canonical_json(settings.network).decode())
    if settings.disk_limit:
        profile = replace(profile, disk_limit=settings.disk_limit)
    train, test = _held_out(data, run.data.held_out, f"{run.seed}/{settings.id}")
    return EmulatedDevice(
        client_id=settings.id,
        profile=profile,
        data=train,
        log=described.log,
        runtime=settings.runtime,
        test=test,
        tier=settings.tier or profile.name,
        attack=settings.attack,
    )


def _pieces(run: Run, names: Sequence[str]) -> tuple[Mapping[str, Dataset], Dataset]:
    """The samples of the devices that have none of their own, and the evaluation data."""
    if not names:
        return {}, _first(_read(run, run.data.evaluated_on), run.data.test_samples)
    train = _training(run, names[0])
    if 0 < run.data.samples < len(train):
        drawn = np.random.default_rng(run.seed).permutation(len(train))[: run.data.samples]
        train = train.take(np.sort(drawn))
    evaluation = _first(_read(run, run.data.evaluated_on), run.data.test_samples)
    train, evaluation = _standardised(run.data, train, evaluation)
    parts = partition(train, run.data.partition, clients=len(names), seed=run.seed)
    return {name: train.take(indices) for name, indices in zip(names, parts, strict=True)}, evaluation


def _training(run: Run, needed_by: str) -> Dataset:
    if run.data.train:
        return _read(run, run.data.train)
    if not run.data.name:
        raise ConfigError(
            f"data.name and data.train are empty, but {needed_by!r} has no samples of its own; name a known data set "
            "or samples there, or data of the device"
        )
    return fit_to_form(DATASETS.named(run.data.name).load().train, _form(run), f"{run.data.name}:train")


def _read(run: Run, source: str) -> Dataset:
    return read_dataset(source, _form(run))


def _form(run: Run) -> DataForm:
    """As the run's model takes samples; which class is which, the parties find out by themselves."""
    numbers = not run.training.objective.kind.over_classes
    return DataForm(
        input_shape=run.model.input_shape,
        classes=None,
        label_shape=run.label_shape if numbers else None,
        targets=numbers,
        transform=run.data.transform,
    )


def _first(data: Dataset, count: int) -> Dataset:
    return data.take(np.arange(min(count or len(data), len(data))))


def _standardised(settings: DataSettings, train: Dataset, evaluation: Dataset) -> tuple[Dataset, Dataset]:
    if not settings.standardise:
        return train, evaluation
    if train.inputs.dtype != np.float32:
        raise ConfigError(
            f"data.standardise is set, but inputs are {train.inputs.dtype}, no measurements; leave it out"
        )
    mean, deviation = train.inputs.mean(), train.inputs.std()
    scaled = (replace(one, inputs=((one.inputs - mean) / deviation).astype(np.float32)) for one in (train, evaluation))
    return next(scaled), next(scaled)


def _held_out(data: Dataset, share: float, stream: str) -> tuple[Dataset, Dataset | None]:
    """What a device trains on, and what it is evaluated on; drawn anew for each device."""
    if not share:
        return data, None
    order = np.random.default_rng(list(stream.encode())).permutation(len(data))
    count = max(1, round(share * len(data)))
    return data.take(np.sort(order[count:])), data.take(np.sort(order[:count]))


def _spread(log: ResourceLog, count: int) -> list[ResourceLog]:
    """A log for each of several devices that are alike: each begins equal parts further on."""
    return [rotate_log(log, place * len(log.rows) // count) for place in range(count)]
