"""Plays the game in Flower's simulation engine and prints the CPU seconds of each round as JSON.

python benchmarks/emulation_benchmark/flower_app.py '{"members": 100, "taking_part": 20, "rounds": 5}'
"""

import json
import os
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import psutil
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from emulation_benchmark.game import Game

GAME = Game(**json.loads(sys.argv[1])) if len(sys.argv) > 1 else Game()


def measure_cpu_s() -> float:
    """CPU seconds of this process and all below it, which are those of Ray."""
    total, this = 0.0, psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


class Timed(FedAvg):  # type: ignore[misc]
    """FedAvg that notes the CPU seconds at the end of each round."""

    spent_s: list[float]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """See `FedAvg`."""
        aggregated = super().aggregate_train(server_round, replies)
        self.spent_s.append(measure_cpu_s())
        return aggregated


client_app, server_app = ClientApp(), ServerApp()


@client_app.train()  # type: ignore[untyped-decorator]
def train_member(message: Message, context: Context) -> Message:
    """Train on the samples of one member."""
    torch.set_num_threads(1)
    network = GAME.build()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = GAME.draw_samples(int(context.node_config["partition-id"]))
    loss = GAME.train(network, images, labels)
    metrics = MetricRecord({"loss": loss, "num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)


@server_app.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    """Run all rounds, and print what each took."""
    strategy = Timed(
        fraction_train=GAME.taking_part / GAME.members,
        fraction_evaluate=0.0,
        min_train_nodes=GAME.taking_part,
        min_available_nodes=GAME.members,
    )
    strategy.spent_s = [measure_cpu_s()]
    strategy.start(grid=grid, initial_arrays=ArrayRecord(GAME.build().state_dict()), num_rounds=GAME.rounds)
    marks = strategy.spent_s
    sys.stdout.write(json.dumps([after - before for before, after in pairwise(marks)]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=GAME.members,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "include_dashboard": False}},
    )
