"""Costs of attackers with each treatment of outliers, and its costs for honest devices with unequal data.

python benchmarks/outliers.py --outliers scale exclude report     # Markdown tables
python benchmarks/outliers.py --smoke                             # one round of one game

The fleets are seven devices with 60 digits each, one possibly an attacker, and one device with 1,200 digits beside five
with 8. Everything runs in one process, with the step that programs are traced from.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from subfleet.arrays import decode_arrays
from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.families.records.residual import Mlp
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.batch.trainers import create_trainers
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.totals import describe_outliers
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.readings import Reading
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.fleet import LabelShuffling
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import LogClock, OutlierSettings
from subfleet.tasks import Dataset, load_digits
from subfleet.trainers.job_files import write_change

LEARNED = 1400
"""Number of digits for training; models are evaluated on the others."""
SAMPLES, DEVICES = 60, 7
PROFILE = DeviceProfile(name="virtual", title="A device of a benchmark", memory_fraction=0.5, runtimes=("torch",))
READING = Reading(memory_free_bytes=2 * 10**8, downlink_bps=1e7, uplink_bps=1e6)
LOG = ResourceLog(device="virtual", source="a benchmark", licence="none", rows=(LogRow(t_s=0.0, reading=READING),))


class MultiplyingTrainer:
    """A trainer that multiplies its changes by a factor."""

    def __init__(self, inner: Any, factor: float) -> None:
        self._inner = inner
        self._factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def train(self, job: Any, stopped: Any) -> Any:
        """See `Trainer.train`."""
        result = self._inner.train(job, stopped)
        arrays = decode_arrays(job.output_path.read_bytes())
        write_change(
            job, {name: (self._factor * np.asarray(array)).astype(np.float32) for name, array in arrays.items()}
        )
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A fleet, and the factor on the last device's changes."""

    devices: Callable[[int], list[EmulatedDevice]]
    factor: float = 1.0


def draw_samples(count: int, seed: int) -> Dataset:
    """Draw digits with replacement, and add noise."""
    digits = load_digits().take(np.random.default_rng(seed).integers(0, LEARNED, count))
    noise = np.random.default_rng(seed + 1).normal(0, 0.05 * digits.inputs.max(), digits.inputs.shape)
    return replace(digits, inputs=np.clip(digits.inputs + noise, 0, None).astype(digits.inputs.dtype))


def create_fleet(counts: Sequence[int], seed: int) -> list[EmulatedDevice]:
    """Create a device for each count of samples."""
    return [
        EmulatedDevice(
            client_id=f"client-{index}",
            profile=PROFILE,
            data=draw_samples(count, 100 * seed + 2 * index),
            log=LOG,
            runtime="torch",
        )
        for index, count in enumerate(counts)
    ]


def create_honest_fleet(seed: int) -> list[EmulatedDevice]:
    """Create seven honest devices."""
    return create_fleet([SAMPLES] * DEVICES, seed)


def create_shuffling_fleet(strength: float) -> Callable[[int], list[EmulatedDevice]]:
    """Create a fleet with a last device that also sends a change learned from shuffled labels."""
    return lambda seed: [
        *create_honest_fleet(seed)[:-1],
        replace(create_honest_fleet(seed)[-1], attack=LabelShuffling(strength=strength)),
    ]


def create_flipped_fleet(seed: int) -> list[EmulatedDevice]:
    """Create a fleet with a last device that learns from wrong labels."""
    *others, last = create_honest_fleet(seed)
    return [*others, replace(last, data=replace(last.data, labels=9 - last.data.labels))]


def create_rich_fleet(seed: int) -> list[EmulatedDevice]:
    """Create a fleet with a last device that has fifty times the samples of the others."""
    return create_fleet([SAMPLES] * (DEVICES - 1) + [50 * SAMPLES], seed)


GAMES: Mapping[str, Game] = MappingProxyType(
    {
        "nobody attacks": Game(devices=create_honest_fleet),
        "without the attacker": Game(devices=lambda seed: create_honest_fleet(seed)[:-1]),
        "shuffled labels, times 10^6": Game(devices=create_shuffling_fleet(1e6)),
        "shuffled labels, times 20": Game(devices=create_shuffling_fleet(20.0)),
        "flipped labels": Game(devices=create_flipped_fleet),
        "sign flipped, times 1": Game(devices=create_honest_fleet, factor=-1.0),
        "sign flipped, times 3": Game(devices=create_honest_fleet, factor=-3.0),
        "sign flipped, times 5": Game(devices=create_honest_fleet, factor=-5.0),
        "sign flipped, times 7": Game(devices=create_honest_fleet, factor=-7.0),
        "sign flipped, times 10": Game(devices=create_honest_fleet, factor=-10.0),
        "sign flipped, times 30": Game(devices=create_honest_fleet, factor=-30.0),
        "NaN": Game(devices=create_honest_fleet, factor=float("nan")),
        "fifty times the samples, sign flipped": Game(devices=create_rich_fleet, factor=-1.0),
        "fifty times the samples, sign flipped, times 10": Game(devices=create_rich_fleet, factor=-10.0),
        "fifty times the samples, sign flipped, times 100": Game(devices=create_rich_fleet, factor=-100.0),
        "honest: 1,200 samples beside five of 8": Game(devices=lambda seed: create_fleet([1200, 8, 8, 8, 8, 8], seed)),
    }
)


def play(game: Game, outliers: OutlierSettings, seed: int, rounds: int, exports: ExportPool) -> tuple[float, str]:
    """Play a game, and return the final accuracy and the treatment of outliers."""
    devices = game.devices(seed)
    run = Run(
        name="outliers",
        model=Mlp(input_shape=(1, 8, 8), class_count=10, widths=(64,), depths=(1,), group_size=4),
        data=DataSettings(test="unused"),
        rounds=rounds,
        min_clients=len(devices),
        training=TrainingSettings(epochs=2, batch_size=8, learning_rate=0.05),
        method=HeteroFL(weighting="samples", class_mask=False, depth=True),
        clock=LogClock(start_s=0.0, step_s=60.0),
        targets=("torch",),
        deploy_targets=(),
        outliers=outliers,
        seed=seed,
    )
    trainers = None
    if game.factor != 1:
        trainers = {devices[-1].client_id: MultiplyingTrainer(create_trainers({"torch"})["torch"], game.factor)}
    evaluation = load_digits().take(np.arange(LEARNED, len(load_digits())))
    gathered = GatheredRun(run=run, devices=tuple(devices), evaluation=evaluation)
    result = run_batch(gathered, exports, trainers=trainers)
    return result.rounds[-1].accuracy, "; ".join(describe_outliers(result.rounds))


def main(arguments: Sequence[str]) -> int:
    """Print a row for each game: the mean accuracy per treatment, and the treatment in the last seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outliers", nargs="+", default=["scale", "exclude", "report"])
    parser.add_argument("--games", nargs="+", default=list(GAMES), choices=list(GAMES), metavar="GAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    games, seeds, rounds = (
        (options.games[:1], 1, 1) if options.smoke else (options.games, options.seeds, options.rounds)
    )
    print(f"| game | {' | '.join(options.outliers)} | what was done |")
    print(f"| --- | {'---: | ' * len(options.outliers)}--- |")
    with tempfile.TemporaryDirectory() as folder, ExportPool(CacheFolder(path=Path(folder)), workers=1) as exports:
        for name in games:
            cells, treatment = [], ""
            for way in options.outliers:
                settings = OutlierSettings(outliers=way)
                results = [play(GAMES[name], settings, seed, rounds, exports) for seed in range(1, seeds + 1)]
                cells.append(f"{100 * statistics.fmean(accuracy for accuracy, _ in results):.1f}")
                treatment = treatment or results[-1][1]
            print(f"| {name} | {' | '.join(cells)} | {treatment or '-'} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
