"""What a run says of data and devices is read as it says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from subfleet import tasks
from subfleet.device_profiles import load_log
from subfleet.emulation.files import written
from subfleet.emulation.gathering import gathered
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.settings.fleet import DeviceSettings, FleetSettings
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run

pytestmark = pytest.mark.slow


def with_devices(*devices: DeviceSettings, **data: object) -> Run:
    run = read_run("quickstart")
    return replace(
        run,
        min_clients=1,
        fleet=FleetSettings(devices=devices),
        data=replace(run.data, **data),  # type: ignore[arg-type]
    )


def test_pieces_are_disjoint_and_complete(tmp_path: Path) -> None:
    run = read_run("quickstart")
    files = written(gathered(run), tmp_path)
    assert set(files.clients) == {device.id for device in run.fleet.devices}
    pieces = [tasks.read_dataset(str(path)) for path in (files.test, *files.clients.values())]
    rows = np.concatenate([piece.inputs.reshape(len(piece.labels), -1) for piece in pieces])
    everything = tasks.digits().inputs.reshape(-1, 64)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, everything))


def test_the_same_run_gives_the_same_files(tmp_path: Path) -> None:
    run = read_run("quickstart")
    first, again = written(gathered(run), tmp_path / "a"), written(gathered(run), tmp_path / "b")
    for client, path in first.clients.items():
        one, other = tasks.read_dataset(str(path)), tasks.read_dataset(str(again.clients[client]))
        assert np.array_equal(one.inputs, other.inputs)
        assert np.array_equal(one.labels, other.labels)
        assert first.logs[client].read_bytes() == again.logs[client].read_bytes()


def test_devices_that_are_alike_begin_at_other_points_of_one_log() -> None:
    run = with_devices(DeviceSettings(id="pi", log="raspberry_pi_4", count=3))
    log, devices = load_log("raspberry_pi_4"), gathered(run).devices
    assert [device.client_id for device in devices] == ["pi-1", "pi-2", "pi-3"]
    assert devices[0].log == log
    for place, device in enumerate(devices):
        start = place * len(log.rows) // 3
        turned = [*log.rows[start:], *log.rows[:start]]
        assert [row.reading for row in device.log.rows] == [row.reading for row in turned]
        times = [row.t_s for row in device.log.rows]
        assert times[0] == 0
        assert times == sorted(set(times))
    assert len({tuple(row.reading for row in device.log.rows[:5]) for device in devices}) == 3


def test_samples_are_drawn_scaled_and_held_out_as_the_run_says() -> None:
    two = (DeviceSettings(id="a", log="laptop"), DeviceSettings(id="b", log="laptop"))
    found = gathered(with_devices(*two, samples=600, test_samples=50, held_out=0.2, standardise=True))
    assert len(found.evaluation) == 50
    for device in found.devices:
        assert device.test is not None
        assert len(device.test) == round(0.2 * (len(device.test) + len(device.data)))
    whole = np.concatenate([part.inputs for one in found.devices for part in (one.data, one.test) if part is not None])
    assert len(whole) == 600
    assert float(whole.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(whole.std()) == pytest.approx(1.0, rel=1e-5)


def test_a_device_may_bring_its_own_samples(tmp_path: Path) -> None:
    own = tasks.digits().take(np.arange(25))
    tasks.write_npz(tmp_path / "own.npz", own)
    mine = DeviceSettings(id="mine", log="laptop", data=str(tmp_path / "own.npz"))
    found = gathered(with_devices(mine, DeviceSettings(id="other", log="laptop")))
    assert len(found.devices[0].data) == 25
    assert len(found.devices[1].data) == len(tasks.read_dataset("digits:train"))
    alone = gathered(with_devices(mine, name="", test="digits:test"))
    assert len(alone.devices) == 1


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
def test_what_cannot_be_had_is_one_sentence(
    devices: tuple[DeviceSettings, ...], data: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        gathered(with_devices(*devices, **data))
