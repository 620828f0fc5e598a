"""Reads what a run says of data and devices: every profile, log and sample of its emulated fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from subfleet.device_profiles import LogRow, ResourceLog, load_log, load_profile
from subfleet.device_profiles.drawing import PopulationDevice, draw_devices
from subfleet.device_profiles.populations import load_population
from subfleet.device_profiles.replay import rotate_log
from subfleet.emulation.gathered import EmulatedDevice, GatheredRun
from subfleet.emulation.partitions import partition
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import canonical_json
from subfleet.settings.fleet import DeviceSettings
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.tasks.data_form import fit_to_form
from subfleet.tasks.named_dataset import DATASETS
from subfleet.tasks.source_files import find_data_folders

__all__ = ["gathered"]


def gathered(run: Run) -> GatheredRun:
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
        for device, taken in zip(settings.each(), _taken(run, settings), strict=True):
            data = _read(run, device.data) if device.data else pieces[device.id]
            devices.append(_device(run, device, taken, data))
    return GatheredRun(run=run, devices=tuple(devices), evaluation=evaluation)


def _taken(run: Run, settings: DeviceSettings) -> Sequence[PopulationDevice]:
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


def _device(run: Run, settings: DeviceSettings, taken: PopulationDevice, data: Dataset) -> EmulatedDevice:
    profile = taken.profile
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
        log=taken.log,
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
