"""The data and devices of a run are gathered according to its settings."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from subfleet import tasks
from subfleet.device_profiles import ReplayedLog, load_log, load_profile
from subfleet.device_profiles.drawing import draw_devices
from subfleet.device_profiles.populations import load_population
from subfleet.device_profiles.replay import rotate_log
from subfleet.emulation.files import write_files
from subfleet.emulation.gathering import build_profile, gather_run
from subfleet.emulation.processes import run_processes
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.readings import Reading
from subfleet.settings.fleet import DeviceSettings, FleetSettings, LabelShuffling
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run

pytestmark = pytest.mark.slow


def with_devices(*devices: DeviceSettings, **data: object) -> Run:
    run = read_run("quickstart")
    return replace(
        run,
        min_clients=1,
        fleet=FleetSettings(devices=devices),
        data=replace(run.data, **{"held_out": 0.0, **data}),  # type: ignore[arg-type]
    )


def test_pieces_are_disjoint_and_complete(tmp_path: Path) -> None:
    run = read_run("quickstart")
    files = write_files(gather_run(run), tmp_path)
    assert set(files.clients) == {device.id for device in run.fleet.devices}
    paths = (files.test, *files.clients.values(), *files.held_out.values())
    pieces = [tasks.read_dataset(str(path)) for path in paths]
    rows = np.concatenate([piece.inputs.reshape(len(piece.labels), -1) for piece in pieces])
    everything = tasks.load_digits().inputs.reshape(-1, 64)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, everything))


def test_the_same_run_gives_the_same_files(tmp_path: Path) -> None:
    run = read_run("quickstart")
    first, second = write_files(gather_run(run), tmp_path / "a"), write_files(gather_run(run), tmp_path / "b")
    for client, path in first.clients.items():
        first_data, second_data = tasks.read_dataset(str(path)), tasks.read_dataset(str(second.clients[client]))
        assert np.array_equal(first_data.inputs, second_data.inputs)
        assert np.array_equal(first_data.labels, second_data.labels)
        assert first.logs[client].read_bytes() == second.logs[client].read_bytes()


def test_equal_devices_begin_at_different_points_of_a_log() -> None:
    run = with_devices(DeviceSettings(id="pi", log="raspberry_pi_4", count=3))
    log, devices = load_log("raspberry_pi_4"), gather_run(run).devices
    assert [device.client_id for device in devices] == ["pi-1", "pi-2", "pi-3"]
    assert {id(device.log) for device in devices} == {id(devices[0].log)}, "it is in memory once"
    for index, device in enumerate(devices):
        start = index * len(log.rows) // 3
        rotated, replayed = [*log.rows[start:], *log.rows[:start]], ReplayedLog(device.log, device.log_start)
        times = [row.t_s for row in rotate_log(device.log, device.log_start).rows]
        assert times[0] == 0
        assert times == sorted(set(times))
        assert [replayed.read(time_s) for time_s in times] == [row.reading for row in rotated]
    assert len({ReplayedLog(device.log, device.log_start).read(0.0) for device in devices}) == 3


def test_samples_are_drawn_scaled_and_held_out_as_the_run_says() -> None:
    two = (DeviceSettings(id="a", log="laptop"), DeviceSettings(id="b", log="laptop"))
    gathered = gather_run(with_devices(*two, samples=600, test_samples=50, held_out=0.2, standardise=True))
    assert len(gathered.evaluation) == 50
    for device in gathered.devices:
        assert device.test is not None
        assert len(device.test) == round(0.2 * (len(device.test) + len(device.data)))
    inputs = np.concatenate(
        [part.inputs for client in gathered.devices for part in (client.data, client.test) if part is not None]
    )
    assert len(inputs) == 600
    assert float(inputs.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(inputs.std()) == pytest.approx(1.0, rel=1e-5)


def test_a_device_that_holds_out_little_holds_out_a_sample() -> None:
    two = [DeviceSettings(id=name, profile="laptop", log="laptop") for name in ("ada", "bob")]
    gathered = gather_run(with_devices(*two, samples=600, held_out=0.001))
    assert [len(device.test) for device in gathered.devices if device.test is not None] == [1, 1]


def test_held_out_samples_are_written_for_client_processes(tmp_path: Path) -> None:
    run = read_run("quickstart")
    nothing = replace(run, data=replace(run.data, held_out=0.0))
    assert not write_files(gather_run(nothing), tmp_path / "none").held_out
    gathered = gather_run(replace(run, data=replace(run.data, held_out=0.25)))
    files = write_files(gathered, tmp_path / "some")
    assert set(files.held_out) == set(files.clients)
    for device in gathered.devices:
        test, train = (tasks.read_dataset(str(paths[device.client_id])) for paths in (files.held_out, files.clients))
        assert device.test is not None
        assert np.array_equal(test.inputs, device.test.inputs)
        rows = {bytes(row) for row in train.inputs}
        assert not rows & {bytes(row) for row in test.inputs}, "no sample is in both"
        assert build_profile(device).held_out_count == len(test)


def test_a_device_may_bring_its_own_samples(tmp_path: Path) -> None:
    samples = tasks.load_digits().take(np.arange(25))
    tasks.write_npz(tmp_path / "own.npz", samples)
    device = DeviceSettings(id="mine", log="laptop", data=str(tmp_path / "own.npz"))
    gathered = gather_run(with_devices(device, DeviceSettings(id="other", log="laptop")))
    assert len(gathered.devices[0].data) == 25
    assert len(gathered.devices[1].data) == len(tasks.read_dataset("digits:train"))
    single = gather_run(with_devices(device, name="", test="digits:test"))
    assert len(single.devices) == 1


def test_user_samples_are_split_like_those_of_a_known_data_set(tmp_path: Path) -> None:
    tasks.write_npz(tmp_path / "mine.npz", tasks.read_dataset("digits:train").take(np.arange(300)))
    two = (DeviceSettings(id="a", log="laptop"), DeviceSettings(id="b", log="laptop"))
    from_file = gather_run(with_devices(*two, name="", train=str(tmp_path / "mine.npz"), test="digits:test"))
    assert sum(len(device.data) for device in from_file.devices) == 300
    by_name = gather_run(with_devices(*two))
    by_parts = gather_run(with_devices(*two, name="", train="digits:train", test="digits:test"))
    for first, second in zip(by_name.devices, by_parts.devices, strict=True):
        assert first.data.inputs.tobytes() == second.data.inputs.tobytes()
    with pytest.raises(ConfigError, match="train are empty, but the device 'a' has no samples of its own"):
        gather_run(with_devices(*two, name="", test="digits:test"))


def test_devices_of_a_population_are_drawn_by_the_run_s_seed_and_their_id() -> None:
    settings = DeviceSettings(id="some", population="mixed", count=6)
    devices = gather_run(with_devices(settings)).devices
    drawn = draw_devices(load_population("mixed"), 6, seed="3/some", data=None)
    assert [(device.profile, device.log) for device in devices] == [
        (drawn_device.profile, drawn_device.log) for drawn_device in drawn
    ]
    assert [device.tier for device in devices] == [drawn_device.profile.name for drawn_device in drawn]
    other_devices = gather_run(with_devices(replace(settings, id="other"))).devices
    assert [device.log for device in other_devices] != [device.log for device in devices]
    runs = [with_devices(settings), with_devices(replace(settings, population="", log="laptop"))]
    assert len({run.fingerprint() for run in runs}) == 2
    assert len({gather_run(run).devices[0].log.source for run in runs}) == 2


def test_a_steady_reading_replaces_logs() -> None:
    reading = Reading(memory_free_bytes=10**9, downlink_bps=1e6)
    steady = DeviceSettings(id="a", steady=reading, count=2)
    of_population = DeviceSettings(id="b", population="mixed", steady=reading, count=3)
    devices = gather_run(with_devices(steady, of_population)).devices
    assert [[row.reading for row in device.log.rows] for device in devices] == [[reading]] * 5
    drawn = draw_devices(load_population("mixed"), 3, seed="3/b", data=None)
    assert [device.profile for device in devices[2:]] == [drawn_device.profile for drawn_device in drawn]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({}, "log is missing"),
        ({"log": "laptop", "population": "mixed"}, "log is 'laptop' beside population"),
        ({"profile": "laptop", "population": "mixed"}, "profile is 'laptop' beside population"),
    ],
)
def test_a_device_has_one_source_of_its_profile_and_log(device: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeviceSettings(id="a", **device)  # type: ignore[arg-type]


def test_attackers_are_those_of_the_run_and_client_processes_refuse_them(tmp_path: Path, exports: ExportPool) -> None:
    honest = DeviceSettings(id="honest", log="laptop", count=2)
    run = with_devices(honest, DeviceSettings(id="eve", log="laptop", attack=LabelShuffling(strength=5.0)))
    assert [device.attack for device in gather_run(run).devices] == [None, None, LabelShuffling(strength=5.0)]
    with pytest.raises(ConfigError, match="'eve' has an attack"):
        run_processes(run, tmp_path / "run", Unobserved(), threading.Event(), exports=exports)


def test_client_processes_read_the_profiles_that_a_population_gave(tmp_path: Path) -> None:
    gathered = gather_run(with_devices(DeviceSettings(id="some", population="mixed", count=4)))
    files = write_files(gathered, tmp_path)
    assert [load_profile(str(files.profiles[device.client_id])) for device in gathered.devices] == [
        device.profile for device in gathered.devices
    ]


@pytest.mark.parametrize(
    ("devices", "data", "error", "words"),
    [
        ((), {}, ConfigError, "has no devices to emulate"),
        ((DeviceSettings(id="a", log="laptob"),), {}, FileError, "did you mean 'laptop'"),
        ((DeviceSettings(id="a", log="laptop", profile="lap"),), {}, ConfigError, "did you mean 'laptop'"),
        (
            (DeviceSettings(id="a", log="laptop"),),
            {"name": "", "test": "digits:test"},
            ConfigError,
            "no samples",
        ),
        ((DeviceSettings(id="a", log="laptop"),), {"name": "digit", "test": "digits:test"}, ConfigError, "digits"),
    ],
)
def test_unavailable_data_and_devices_are_one_sentence(
    devices: tuple[DeviceSettings, ...], data: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        gather_run(with_devices(*devices, **data))
