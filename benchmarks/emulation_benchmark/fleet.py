"""The game in a batch of this project: CPU seconds of each round, in a process of its own."""

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from emulation_benchmark.game import LEARNING_RATE, STEPS, Game
from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.building import network_of
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.spaces import uniform_space
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.records import RoundRecord
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.readings import Reading
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.settings.fleet import HostSettings
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import LogClock
from subfleet.tasks import Dataset

_EVALUATION, _EVALUATED = 1_000_000, 100
"""Number of the member whose samples are the evaluation data, and how many it has."""
_LINK_S = 1.0
"""Seconds in which a member's update must arrive."""


class Timer:
    """Notes the CPU seconds of this process at the end of each round; an observer of the run."""

    def __init__(self) -> None:
        self.marks_s: list[float] = []

    def say(self, text: str) -> None:
        """See `RunObserver`."""

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver`."""
        self.marks_s.append(time.process_time())


@dataclass(frozen=True, kw_only=True)
class Play:
    """How a batch plays the game.

    Attributes:
        game: the game.
        runtime: of all members.
        numerics: as in `HostSettings`.
        submodels: 1 gives every member the whole network and as many samples as the game has; more give them links
            for submodels of so many widths, and numbers of samples from a Dirichlet distribution.
        cache: folder of programs.
        model: file that receives the last model; empty for none.
    """

    game: Game
    runtime: str = "onnx"
    numerics: Literal["exact", "grouped"] = "exact"
    submodels: int = 1
    cache: str
    model: str = ""

    def describe(self) -> dict[str, Any]:
        """The play as plain data."""
        return asdict(self)

    @property
    def rates(self) -> tuple[float, ...]:
        """The widths of submodels."""
        return tuple((number + 1) / self.submodels for number in range(self.submodels))


def gather_game(play: Play) -> GatheredRun:
    """The game as a run of the project; links and devices take no time that anybody waits for."""
    game = play.game
    model = record_network(game.build(), game.image)
    run = Run(
        name="emulation",
        model=model,
        data=DataSettings(test="unused"),
        rounds=game.rounds,
        min_clients=game.taking_part,
        clients_per_round=game.taking_part,
        training=TrainingSettings(
            epochs=1, batch_size=game.batch, learning_rate=LEARNING_RATE, optimiser=OptimiserSettings(momentum=0.0)
        ),
        method=FedAvg() if play.submodels == 1 else HeteroFL(class_mask=False),
        rates=play.rates,
        communication_s=_LINK_S,
        clock=LogClock(),
        targets=(play.runtime,),
        deploy_targets=(),
        seed=1,
        host=HostSettings(type="batch", numerics=play.numerics),
    )
    network = network_of(model)
    counts = sorted(network.parameter_count(size) for size in uniform_space(network, play.rates))
    logs = [_make_log(1.01 * 32 * count / _LINK_S) for count in counts]
    profile = DeviceProfile(name="virtual", title="A member", memory_fraction=0.5, runtimes=(play.runtime,))
    # Members share samples in memory if there are more of them than the game trains.
    samples = [_draw(game, member, count) for member, count in enumerate(_draw_counts(play))]
    devices = tuple(
        EmulatedDevice(
            client_id=f"m{number:05}",
            profile=profile,
            data=samples[number % len(samples)],
            log=logs[number % len(logs)],
            runtime=play.runtime,
        )
        for number in range(game.members)
    )
    return GatheredRun(run=run, devices=devices, evaluation=_draw(game, _EVALUATION, _EVALUATED))


def _make_log(uplink_bps: float) -> ResourceLog:
    reading = Reading(memory_free_bytes=10**9, downlink_bps=1e9, uplink_bps=uplink_bps)
    rows = (LogRow(t_s=0.0, reading=reading),)
    return ResourceLog(device="virtual", source="a benchmark", licence="none", rows=rows)


def _draw_counts(play: Play) -> list[int]:
    """How many samples each member has, with the game's number as their mean."""
    members, usual = min(play.game.members, 200), play.game.batch * STEPS
    if play.submodels == 1:
        return [usual] * members
    shares = np.random.default_rng(2).dirichlet([1.0] * members)
    return [max(1, round(share * members * usual)) for share in shares]


def _draw(game: Game, member: int, count: int) -> Dataset:
    images, labels = game.draw_samples(member, count)
    return Dataset(inputs=images, labels=labels)


def main(arguments: Sequence[str]) -> None:
    """Play as the arguments say, and print what it took."""
    torch.set_num_threads(1)
    settings = json.loads(arguments[0])
    play = Play(**{**settings, "game": Game(**settings["game"])})
    gathered, timer = gather_game(play), Timer()
    before_kib, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with ExportPool(CacheFolder(path=Path(play.cache)), workers=1) as exports:
        result = run_batch(gathered, exports, observer=timer)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    marks_s = [started_s, *timer.marks_s]
    if play.model:
        Path(play.model).write_bytes(result.model)
    found: dict[str, Any] = {
        "rounds_s": [after - before for before, after in pairwise(marks_s)],
        "grown_kib": after_kib - before_kib,
        "accuracy": result.rounds[-1].accuracy,
        "submodels": len({row.architecture for record in result.rounds for row in record.clients if row.architecture}),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
