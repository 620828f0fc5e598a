"""The game in a batch of this project: CPU seconds of each round, in a process of its own."""

import json
import resource
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from emulation_benchmark.game import BATCH, IMAGE, LEARNING_RATE, STEPS, Game, SmallCnn, draw_samples
from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.recording.loading import record_network
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.records import RoundRecord
from subfleet.methods.fedavg import FedAvg
from subfleet.protocol.readings import Reading
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import LogClock
from subfleet.tasks import Dataset

_EVALUATION, _SMALL = 1_000_000, 8
"""Number of the member whose samples are the evaluation data, and how many it has."""


class Timer:
    """Notes the CPU seconds of this process at the end of each round; an observer of the run."""

    def __init__(self) -> None:
        self.marks_s: list[float] = []
        self.trained = 0

    def say(self, text: str) -> None:
        """See `RunObserver`."""

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver`."""
        self.marks_s.append(time.process_time())
        self.trained = sum(row.status == "aggregated" for row in record.clients)


def gather_game(game: Game, runtime: str) -> GatheredRun:
    """The game as a run of the project: FedAvg with the whole network on every device, and links that never wait."""
    reading = Reading(memory_free_bytes=10**9, downlink_bps=1e9, uplink_bps=1e9)
    rows = (LogRow(t_s=0.0, reading=reading),)
    log = ResourceLog(device="virtual", source="a benchmark", licence="none", rows=rows)
    profile = DeviceProfile(name="virtual", title="A member", memory_fraction=0.5, runtimes=(runtime,))
    run = Run(
        name="emulation",
        model=record_network(SmallCnn(), IMAGE),
        data=DataSettings(test="unused"),
        rounds=game.rounds,
        min_clients=game.taking_part,
        clients_per_round=game.taking_part,
        training=TrainingSettings(
            epochs=1, batch_size=BATCH, learning_rate=LEARNING_RATE, optimiser=OptimiserSettings(momentum=0.0)
        ),
        method=FedAvg(),
        clock=LogClock(),
        targets=(runtime,),
        deploy_targets=(),
        seed=1,
    )
    # Members share samples in memory if there are more of them than the game trains.
    samples = [_draw(member) for member in range(min(game.members, 200))]
    devices = tuple(
        EmulatedDevice(
            client_id=f"m{number:05}", profile=profile, data=samples[number % len(samples)], log=log, runtime=runtime
        )
        for number in range(game.members)
    )
    evaluation = _draw(_EVALUATION, _SMALL)
    return GatheredRun(run=run, devices=devices, evaluation=evaluation)


def _draw(member: int, count: int = BATCH * STEPS) -> Dataset:
    images, labels = draw_samples(member, count)
    return Dataset(inputs=images, labels=labels)


def main(arguments: Sequence[str]) -> None:
    """Play the game in the arguments, and print what it took."""
    torch.set_num_threads(1)
    settings = json.loads(arguments[0])
    game, runtime, cache = Game(**settings["game"]), settings["runtime"], settings["cache"]
    gathered, timer = gather_game(game, runtime), Timer()
    before_kib, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with ExportPool(CacheFolder(path=Path(cache)), workers=1) as exports:
        run_batch(gathered, exports, observer=timer)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    marks_s = [started_s, *timer.marks_s]
    found: dict[str, Any] = {
        "rounds_s": [after - before for before, after in pairwise(marks_s)],
        "trained": timer.trained,
        "grown_kib": after_kib - before_kib,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
