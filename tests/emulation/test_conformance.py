"""The emulator decides and computes what real sessions do over messages: the same rounds and the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulation.batch_cases import LARGE_BYTES, SMALL_BYTES, client, experiment
from emulation.message_fleet import play_messages
from matrices import mostly_long

from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.emulation.method_checks import gather_check
from subfleet.export.pool import ExportPool
from subfleet.journal.records import RoundRecord
from subfleet.methods import METHODS
from subfleet.protocol.errors import RunError
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.fleet import HostSettings
from subfleet.settings.sections import Deadlines, Evaluations
from subfleet.transport.in_memory import Faults

pytestmark = [pytest.mark.slow, pytest.mark.export]


def describe(record: RoundRecord) -> dict[str, Any]:
    """What a round decided and computed.

    Left out are bytes on the wire, which the emulator counts without messages, and the space of disks, on which real
    agents keep a state file, too.
    """
    rows = tuple(replace(row, bytes_down=0, bytes_up=0, disk_budget_bytes=None) for row in record.clients)
    return {name: getattr(replace(record, clients=rows), name) for name in record.__dataclass_fields__}


def without_time(gathered: GatheredRun) -> GatheredRun:
    """Real sessions over messages in memory have no links and no pace."""
    return replace(gathered, run=replace(gathered.run, host=HostSettings(durations="none")))


def assert_same(gathered: GatheredRun, exports: ExportPool, folder: Path, faults: Faults | None = None) -> None:
    gathered = without_time(gathered)
    emulated, played = run_batch(gathered, exports), play_messages(gathered, exports, folder, faults=faults)
    assert [*map(describe, emulated.rounds)] == [*map(describe, played.rounds)]
    assert emulated.model == played.model


@pytest.mark.parametrize("name", mostly_long(METHODS, "heterofl", "fedoras", "fluid"))
def test_every_method_runs_as_with_messages(name: str, exports: ExportPool, tmp_path: Path) -> None:
    assert_same(gather_check(METHODS[name]()), exports, tmp_path)


def test_memory_that_changes_and_devices_that_evaluate(exports: ExportPool, tmp_path: Path) -> None:
    gathered = experiment(rounds=4, evaluation=Evaluations(every=1), deploy_targets=("onnx",))
    assert_same(gathered, exports, tmp_path)


def test_small_disks(exports: ExportPool, tmp_path: Path) -> None:
    clients = [client("ada", 0, SMALL_BYTES), client("bob", 1, LARGE_BYTES), client("cyd", 2, LARGE_BYTES)]
    limited = replace(clients[2], profile=replace(clients[2].profile, disk_limit="100K"))
    gathered = replace(experiment(rounds=3), devices=(*clients[:2], limited))
    assert_same(gathered, exports, tmp_path)


def test_refusals_and_lost_attempts(exports: ExportPool, tmp_path: Path) -> None:
    diverging = TrainingSettings(epochs=2, batch_size=8, learning_rate=1e4)
    gathered = experiment(rounds=1, training=diverging, deadlines=Deadlines(attempts_s=60.0))
    with pytest.raises(RunError) as emulated:
        run_batch(gathered, exports)
    with pytest.raises(RunError) as played:
        play_messages(gathered, exports, tmp_path)
    assert str(emulated.value) == str(played.value)


@pytest.mark.parametrize("seed", range(2))
def test_losses_doubles_and_delays_change_no_bit(seed: int, exports: ExportPool, tmp_path: Path) -> None:
    faults = Faults(seed=seed, loss=0.2, double=0.2, delay_s=1.5)
    gathered = experiment()
    emulated, played = run_batch(gathered, exports), play_messages(gathered, exports, tmp_path, faults=faults)
    assert played.model == emulated.model
    assert played.logical_seconds > 2.0, "lost messages were sent again"
