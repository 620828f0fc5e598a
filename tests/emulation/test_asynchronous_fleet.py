"""Asynchronous rounds of an emulated fleet, in logical time and over messages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulation.batch_cases import LARGE_BYTES, SMALL_BYTES, client, config, experiment, part
from emulation.message_fleet import play_messages
from emulation.test_conformance import assert_same, without_time
from matrices import mostly_long
from server.asynchronous_cases import ALLOWED

from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.emulation.method_checks import gather_check
from subfleet.export.pool import ExportPool
from subfleet.methods import METHODS
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.readings import Reading
from subfleet.settings.fleet import DeviceSettings, FleetSettings, HostSettings
from subfleet.settings.sections import AsynchronousSettings
from subfleet.transport.in_memory import Faults

pytestmark = [pytest.mark.slow, pytest.mark.export]

TOGETHER = AsynchronousSettings(buffer=3, concurrency=3)
FAST, SLOW = 1e8, 1e6
"""Multiply-accumulates a second."""


def race(**changes: Any) -> GatheredRun:
    """Two fast devices, one of them with half of the model, and a slow one."""
    devices = [
        replace(device, profile=replace(device.profile, macs_per_s=pace))
        for device, pace in (
            (client("ada", 0, SMALL_BYTES), FAST),
            (client("bob", 1, LARGE_BYTES), FAST),
            (client("cyd", 2, LARGE_BYTES), SLOW),
        )
    ]
    return GatheredRun(run=config(**changes), devices=tuple(devices), evaluation=part(10))


def count_updates(result: BatchResult) -> int:
    return sum(len(record.aggregated) for record in result.rounds)


def test_a_buffer_of_all_devices_is_a_synchronous_round(exports: ExportPool, tmp_path: Path) -> None:
    together = run_batch(without_time(experiment(asynchronous=TOGETHER)), exports)
    plain = run_batch(without_time(experiment()), exports)
    assert together.model == plain.model
    assert together.rounds == plain.rounds
    assert_same(experiment(asynchronous=TOGETHER), exports, tmp_path)


def test_nobody_waits_for_a_slow_device(exports: ExportPool) -> None:
    settings = AsynchronousSettings(buffer=1, concurrency=2)
    asynchronous = run_batch(race(rounds=30, asynchronous=settings), exports)
    synchronous = run_batch(race(rounds=10), exports)
    assert count_updates(asynchronous) == count_updates(synchronous) == 30
    assert asynchronous.logical_seconds < synchronous.logical_seconds / 3
    rows = [row for record in asynchronous.rounds for row in record.clients]
    assert {row.architecture for row in rows if row.client_id == "ada"} == {"w1/2 d1"}
    slow = [row for row in rows if row.client_id == "cyd"]
    assert slow, "it contributes, too"
    assert all(row.staleness > 5 for row in slow)
    seconds = [record.seconds for record in asynchronous.rounds]
    assert all(second is not None for second in seconds)
    assert sum(second or 0.0 for second in seconds) == pytest.approx(asynchronous.logical_seconds, abs=1.0)


def test_one_file_gives_the_same_bits_in_any_order(exports: ExportPool) -> None:
    gathered = race(rounds=8, asynchronous=AsynchronousSettings(buffer=2, concurrency=3))
    first, second = (
        run_batch(replace(gathered, devices=order), exports) for order in (gathered.devices, gathered.devices[::-1])
    )
    assert first.model == second.model
    assert first.rounds == second.rounds


@pytest.mark.long
def test_lost_and_doubled_messages_delay_a_run_and_end_none(exports: ExportPool, tmp_path: Path) -> None:
    gathered = without_time(race(rounds=4, asynchronous=AsynchronousSettings(buffer=2, concurrency=3)))
    played = play_messages(gathered, exports, tmp_path, faults=Faults(seed=1, loss=0.2, double=0.2, delay_s=1.5))
    assert [len(record.aggregated) for record in played.rounds] == [2, 2, 2, 2]


def test_a_buffer_larger_than_the_fleet_is_refused() -> None:
    fleet = FleetSettings(devices=(DeviceSettings(id="pi", profile="raspberry_pi_4", steady=Reading(), count=5),))
    with pytest.raises(ConfigError, match=r"asynchronous\.buffer is 6, but the fleet has 5 devices"):
        config(fleet=fleet, asynchronous=AsynchronousSettings(buffer=6))


@pytest.mark.parametrize("name", mostly_long(sorted(ALLOWED), "heterofl"))
def test_every_method_that_is_allowed_learns(name: str, exports: ExportPool) -> None:
    gathered = gather_check(METHODS[name]())
    settings = AsynchronousSettings(buffer=2, concurrency=len(gathered.devices))
    run = replace(gathered.run, asynchronous=settings, clients_per_round=0, rounds=5)
    result = run_batch(replace(gathered, run=run), exports)
    assert [len(record.aggregated) for record in result.rounds] == [2] * 5
    assert max(row.staleness for record in result.rounds for row in record.clients) > 0
    first, last = result.rounds[0].loss, result.rounds[-1].loss
    assert first is not None
    assert last is not None
    assert last < first
    assert "no device waits for another" in result.result.method_status


def test_updates_that_arrive_together_fill_one_buffer_after_another(exports: ExportPool) -> None:
    gathered = without_time(race(rounds=6, asynchronous=AsynchronousSettings(buffer=1, concurrency=3)))
    result = run_batch(gathered, exports)
    assert [[row.status for row in record.clients] for record in result.rounds] == [["aggregated"]] * 6


def test_updates_of_a_group_count_by_the_age_of_their_own_model(exports: ExportPool) -> None:
    """Devices that train together began with different versions."""
    exact, grouped = (
        run_batch(
            race(
                rounds=5,
                asynchronous=AsynchronousSettings(buffer=1, concurrency=3),
                host=HostSettings(type="batch", numerics=numerics),
            ),
            exports,
        )
        for numerics in ("exact", "grouped")
    )
    for one, other in zip(exact.rounds, grouped.rounds, strict=True):
        assert [(row.client_id, row.staleness) for row in one.clients] == [
            (row.client_id, row.staleness) for row in other.clients
        ]
        assert one.loss == pytest.approx(other.loss, abs=1e-5)
