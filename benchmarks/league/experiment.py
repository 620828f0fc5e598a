"""One game of the league: an entrant, a seed and a number of rounds, as a virtual experiment."""

from dataclasses import replace
from pathlib import Path

from league.entrants import ENTRANTS
from league.fleet import COMMUNICATION_S, devices, without_limits
from league.samples import read
from subfleet.elastic.network import ModelConfig
from subfleet.emulation.virtual.description import VirtualClient, VirtualExperiment
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.server.config import LogClock, ServerConfig

__all__ = ["MODEL", "TRAINING", "game"]

MODEL = ModelConfig(family="mlp", input_shape=(1, 28, 28), class_count=10, widths=(256,), depths=(3,), group_size=16)
TRAINING = TrainingSettings(
    epochs=1, batch_size=32, learning_rate=0.05, optimiser=OptimiserSettings(momentum=0.9, weight_decay=5e-4)
)
RATES = (0.125, 0.25, 0.5, 0.75, 1.0)
LEARNING_RATE_DECAY = 0.97
LOG_STEP_S = 20.0
"""Seconds of the logs from one round to the next."""


def game(entrant: str, seed: int, rounds: int, samples: Path, data: Path) -> VirtualExperiment:
    """Describe a game.

    Args:
        entrant: a name of `ENTRANTS`.
        seed: of the samples, the initial weights, the order of data and the method's own draws.
        rounds: of the run.
        samples: the file that `league.samples.cut` wrote for this seed.
        data: the folder of logs.
    """
    chosen = ENTRANTS[entrant]
    fleet = devices(data)
    found = read(samples, tuple(device.client_id for device in fleet))
    config = ServerConfig(
        name=f"{entrant}-{seed}",
        model=replace(MODEL, **chosen.model),
        evaluation_data="",
        rounds=rounds,
        min_clients=len(fleet),
        training=TRAINING,
        learning_rate_decay=LEARNING_RATE_DECAY,
        method=chosen.method,
        distillation=chosen.distillation,
        rates=RATES,
        seed=seed,
        communication_s=COMMUNICATION_S,
        clock=LogClock(start_s=0.0, step_s=LOG_STEP_S),
        targets=("onnx",),
        deploy_targets=(),
        memory_overhead_bytes={"onnx": 0},
    )
    clients = tuple(
        VirtualClient(
            client_id=device.client_id,
            profile=device.profile,
            data=found.train[device.client_id],
            log=without_limits(device.log) if chosen.unlimited else device.log,
            test=found.test[device.client_id],
            tier=device.kind.name,
        )
        for device in fleet
    )
    return VirtualExperiment(config=config, clients=clients, evaluation=found.evaluation)
