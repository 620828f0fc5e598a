"""One game of the league: an entrant, a seed and a number of rounds, as a virtual experiment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from league.entrants import ENTRANTS, Entrant
from league.fleet import COMMUNICATION_S, LeagueDevice, devices, without_limits
from league.samples import read
from subfleet.elastic.families.records.residual import Mlp
from subfleet.emulation.gathered import EmulatedDevice, GatheredRun
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.timing import LogClock

__all__ = ["MODEL", "TRAINING", "Setting", "game", "play"]

MODEL = Mlp(input_shape=(1, 28, 28), class_count=10, widths=(256,), depths=(3,), group_size=16)
TRAINING = TrainingSettings(
    epochs=3, batch_size=32, learning_rate=0.05, optimiser=OptimiserSettings(momentum=0.9, weight_decay=5e-4)
)
LEARNING_RATE_DECAY = 0.9
"""A round, in games of `DECAY_ROUNDS`; longer ones end at the same rate, a fifth of the first. So what is compared is
not the last round's noise."""
DECAY_ROUNDS = 15
LOG_STEP_S = 20.0
"""Seconds of the logs from one round to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a game is played with, beside its entrant and its fleet.

    Attributes:
        seed: of the samples, the initial weights, the order of data and the method's own draws.
        clients_per_round: how many are drawn for each round; 0 takes all.
    """

    name: str
    seed: int
    rounds: int
    clients_per_round: int = 0


def game(entrant: str, seed: int, rounds: int, samples: Path, data: Path) -> GatheredRun:
    """Describe a game of the league.

    Args:
        entrant: a name of `ENTRANTS`.
        seed: see `Setting`.
        rounds: of the run.
        samples: the file that `league.samples.cut` wrote for this seed.
        data: the folder of logs.
    """
    return play(ENTRANTS[entrant], Setting(name=f"{entrant}-{seed}", seed=seed, rounds=rounds), devices(data), samples)


def play(entrant: Entrant, setting: Setting, fleet: Sequence[LeagueDevice], samples: Path) -> GatheredRun:
    """Describe a game of an entrant on any fleet.

    Args:
        entrant: who plays.
        setting: what the game is played with.
        fleet: the devices.
        samples: the file that `league.samples.cut` wrote for this seed and as many clients.
    """
    found = read(samples, tuple(device.client_id for device in fleet))
    config = Run(
        name=setting.name,
        model=replace(MODEL, **entrant.model),
        data=DataSettings(test="unused"),
        rounds=setting.rounds,
        min_clients=len(fleet),
        training=TRAINING,
        learning_rate_decay=LEARNING_RATE_DECAY ** (DECAY_ROUNDS / setting.rounds),
        method=entrant.method,
        distillation=entrant.distillation,
        rates=entrant.rates,
        clients_per_round=setting.clients_per_round,
        seed=setting.seed,
        communication_s=COMMUNICATION_S,
        clock=LogClock(start_s=0.0, step_s=LOG_STEP_S),
        targets=("onnx",),
        deploy_targets=(),
        memory_overhead_bytes={"onnx": 0},
    )
    clients = tuple(
        EmulatedDevice(
            client_id=device.client_id,
            profile=device.profile,
            data=found.train[device.client_id],
            log=without_limits(device.log) if entrant.unlimited else device.log,
            test=found.test[device.client_id],
            tier=device.tier,
        )
        for device in fleet
    )
    return GatheredRun(run=config, devices=clients, evaluation=found.evaluation)
