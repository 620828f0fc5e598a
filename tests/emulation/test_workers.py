"""Worker processes of a batch: the same bits as without them, whatever happens to one."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from agent.agent_cases import RESULT, train_task
from emulation.batch_cases import experiment

from subfleet.edge_client.task_work import Outcome, TrainingOutput
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.batch.work import ClientMeans
from subfleet.emulation.batch.workers import MOST_DEATHS, Order, WorkerPool
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import RoundRecord
from subfleet.protocol.errors import RunError
from subfleet.settings.fleet import HostSettings, LabelShuffling

pytestmark = [pytest.mark.slow]
MEANS = ClientMeans(runtime="onnx", threads=1, attack=None, data=Path("none"), held_out=None, folder=Path("none"))


class Killer(Unobserved):
    """Kills a worker process after the first round."""

    def __init__(self) -> None:
        self.killed = 0

    def round_finished(self, record: RoundRecord) -> None:
        if record.round == 1:
            workers = [child for child in psutil.Process().children() if "popen_loky" in " ".join(child.cmdline())]
            workers[0].kill()
            workers[0].wait()
            self.killed += 1


def play(exports: ExportPool, host: HostSettings, observer: Unobserved | None = None) -> BatchResult:
    gathered = experiment(host=host)
    bob = replace(gathered.devices[1], attack=LabelShuffling(strength=2.0))
    devices = (gathered.devices[0], bob, *gathered.devices[2:])
    return run_batch(replace(gathered, devices=devices), exports, observer=observer)


@pytest.mark.export
def test_workers_give_the_same_bits_and_so_does_a_killed_one(exports: ExportPool) -> None:
    killer = Killer()
    alone = play(exports, HostSettings(type="batch"))
    spread = play(exports, HostSettings(type="batch", workers=2), killer)
    assert killer.killed == 1
    assert spread.model == alone.model
    assert spread.rounds == alone.rounds
    assert spread.logical_seconds == alone.logical_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlyOrder(Order):
    """An order whose process is killed the first times that it is done.

    Attributes:
        marks: a folder with a file for each of its deaths.
        deaths: how often.
    """

    marks: Path
    deaths: int

    def do(self) -> Outcome:
        died = len(list(self.marks.iterdir()))
        if died < self.deaths:
            (self.marks / str(died)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return TrainingOutput(task_id=self.task.task_id, result=RESULT, output_path=self.marks)


def give(pool: WorkerPool, marks: Path, deaths: int) -> Callable[[], Outcome]:
    marks.mkdir()
    order = DeadlyOrder(
        task=train_task("t1", 1), memory_limit_bytes=1, means=MEANS, blobs={}, marks=marks, deaths=deaths
    )
    return pool.begin(order)


def test_tasks_of_a_killed_worker_are_done_again(tmp_path: Path) -> None:
    with WorkerPool(1) as pool:
        finishes = [give(pool, tmp_path / name, deaths) for name, deaths in (("first", 1), ("second", 0))]
        assert [finish().task_id for finish in reversed(finishes)] == ["t1", "t1"]
        finish = give(pool, tmp_path / "third", MOST_DEATHS)
        with pytest.raises(RunError, match="ended 3 times during task 't1' of"):
            finish()
