"""Headroom of a task: its largest network compared with its smallest, and with a linear model.

python benchmarks/headroom.py benchmarks/fedtrans.toml --largest heterofl --smallest fedavg
python benchmarks/headroom.py ... --json
python benchmarks/headroom.py ... --spoil labels    # trains on labels in random order: must fail
python benchmarks/headroom.py ... --spoil linear    # uses the linear model as the largest: must fail

The networks belong to entries of the file's sweep. Each is trained in one place, in PyTorch, on the pooled samples of
all devices, with the run's optimiser, mirrored images if devices mirror them, and a learning rate that falls to 0 along
a cosine. Each network gets the best of the tried learning rates. It is tested on the server's samples.

The exit status is 1 if the largest is not ten points or more above each of the others: then methods that assign larger
networks in different ways cannot be distinguished.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from smoke import DIGITS, parse_arguments
from torch import Tensor, nn

from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.families.records.choices import ChoiceRnn
from subfleet.emulation.gathering import gather_run
from subfleet.protocol.errors import ConfigError, SubfleetError
from subfleet.settings.reading import read_runs
from subfleet.settings.run import Run
from subfleet.tasks import Dataset

HERE = Path(__file__).resolve().parent
_FLEET = ("fleet.devices.0.count=2", "min_clients=2", "fleet.devices.0.population=mixed")
LEAST = 0.10
"""Least difference of accuracy between the largest model and each other one."""
Spoiled = Literal["", "labels", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that was trained on all data.

    Attributes:
        name: "largest", "smallest" or "linear".
        forward_macs: multiplications of one sample's forward pass.
        accuracy: accuracy on the server's samples.
        learning_rate: the best of the learning rates that were tried.
    """

    name: str
    parameters: int
    forward_macs: int
    accuracy: float
    learning_rate: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The pooled training data of all devices, and the server's test samples."""

    run: Run
    train: Dataset
    test: Dataset

    @classmethod
    def load(cls, run: Run, spoil: Spoiled) -> "Task":
        """Load the task of a run, with shuffled labels if an error is planted."""
        gathered = gather_run(run)
        inputs, labels = ([getattr(device.data, name) for device in gathered.devices] for name in ("inputs", "labels"))
        train = Dataset(inputs=np.concatenate(inputs), labels=np.concatenate(labels))
        if spoil == "labels":
            train = replace(train, labels=np.random.default_rng(run.seed).permutation(train.labels))
        return cls(run=run, train=train, test=gathered.samples)

    def measure_accuracy(self, module: nn.Module, *, epochs: int, batch_size: int, learning_rate: float) -> float:
        """Train a module on the task, and return its accuracy on the server's samples."""
        optimiser = self.run.training.optimiser
        stream = torch.Generator().manual_seed(self.run.seed)
        inputs, labels = (torch.from_numpy(array) for array in (self.train.inputs, self.train.labels))
        sgd = torch.optim.SGD(
            module.parameters(), lr=learning_rate, momentum=optimiser.momentum, weight_decay=optimiser.weight_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, epochs * -(-len(labels) // batch_size))
        for _ in range(epochs):
            for indices in torch.randperm(len(labels), generator=stream).split(batch_size):
                batch = inputs[indices]
                if self.run.training.augmentation.flips:
                    mirrored = torch.rand(len(indices), generator=stream) < 0.5
                    batch[mirrored] = batch[mirrored].flip(-1)
                sgd.zero_grad()
                logits, targets = _drop_padding(module.train()(batch), labels[indices])
                nn.functional.cross_entropy(logits, targets).backward()
                if optimiser.max_gradient_norm:
                    nn.utils.clip_grad_norm_(module.parameters(), optimiser.max_gradient_norm)
                sgd.step()
                schedule.step()
        with torch.inference_mode():
            logits = module.eval()(torch.from_numpy(self.test.inputs))
            logits, targets = _drop_padding(logits, torch.from_numpy(self.test.labels))
        return float((logits.argmax(1) == targets).float().mean())


def _drop_padding(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (predictions, classes) and labels (predictions,) of single tokens, without padding."""
    counts = labels >= 0
    return logits[counts], labels[counts]


def find_run(runs: Sequence[Run], entry: str) -> Run:
    """Find the run of a sweep's entry.

    Raises:
        ConfigError: the sweep has no such entry.
    """
    matches = [run for run in runs if run.name.removesuffix(f"-s{run.seed}").endswith(f"-{entry}")]
    if not matches:
        raise ConfigError(f"no entry of the sweep is {entry!r}; name one of {', '.join(run.name for run in runs)}")
    return matches[0]


def build_elastic(run: Run) -> nn.Module:
    """Build the whole network of a run with its first weights."""
    network = network_of(run.model)
    module = build_module(network, network.full_architecture())
    module.load_state_dict(init_state(network, run.seed))
    return module


def build_linear(run: Run) -> nn.Module:
    """Build one layer from inputs to classes, or from a symbol to the next one, initialised with zeros."""
    if isinstance(run.model, ChoiceRnn):
        table = nn.Embedding(run.model.vocabulary, run.model.class_count)
        nn.init.zeros_(table.weight)
        return table
    layer = nn.Linear(math.prod(run.model.input_shape), run.model.class_count)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def _count_macs(run: Run) -> int:
    network = network_of(run.model)
    return estimate_cost(network, network.full_architecture(), batch_size=1).forward_macs


def train_best(task: Task, name: str, run: Run | None, options: argparse.Namespace) -> TrainedModel:
    """Train a run's whole network, or the linear model without a run, and keep the best learning rate."""
    build = partial(build_linear, task.run) if run is None else partial(build_elastic, run)
    rates = options.linear_rates if run is None else options.rates
    started_s = time.monotonic()
    accuracies = {
        rate: task.measure_accuracy(build(), epochs=options.epochs, batch_size=options.batch_size, learning_rate=rate)
        for rate in rates
    }
    best = max(accuracies, key=lambda rate: accuracies[rate])
    return TrainedModel(
        name=name,
        parameters=sum(parameter.numel() for parameter in build().parameters()),
        forward_macs=math.prod(task.run.model.input_shape) * task.run.model.class_count
        if run is None
        else _count_macs(run),
        accuracy=accuracies[best],
        learning_rate=best,
        seconds=time.monotonic() - started_s,
    )


def measure(options: argparse.Namespace) -> list[TrainedModel]:
    """Train the largest, the smallest and the linear model.

    Raises:
        SubfleetError: the file, its entries or its data cannot be read.
    """
    runs = read_runs(options.run, options.set, [options.seed])
    largest, smallest = find_run(runs, options.largest), find_run(runs, options.smallest)
    task = Task.load(largest, options.spoil)
    models = {"largest": None if options.spoil == "linear" else largest, "smallest": smallest, "linear": None}
    return [train_best(task, name, run, options) for name, run in models.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print accuracies and differences; return 1 if a difference is too small."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", nargs="?", default="", help="a run file with a sweep")
    parser.add_argument("--largest", default="", metavar="ENTRY", help="entry with the largest network")
    parser.add_argument("--smallest", default="", metavar="ENTRY", help="entry with the smallest network")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.05], help="learning rates to try")
    parser.add_argument(
        "--linear-rates",
        type=float,
        nargs="+",
        default=[0.0005, 0.002],
        help="learning rates to try for the linear model",
    )
    parser.add_argument("--seed", type=int, default=101, help="seed of first weights, batches and held-out samples")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the file")
    parser.add_argument(
        "--spoil", choices=["", "labels", "linear"], default="", help="plant an error that must be found"
    )
    parser.add_argument("--json", action="store_true")
    game = {
        "run": f"{HERE}/fedtrans.toml",
        "set": [*DIGITS, *_FLEET],
        "largest": "heterofl",
        "smallest": "fedavg",
        "epochs": 1,
    }
    options = parse_arguments(parser, arguments, **game)
    torch.set_num_threads(1)
    try:
        models = measure(options)
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    above = {model.name: models[0].accuracy - model.accuracy for model in models[1:]}
    enough = min(above.values()) >= LEAST
    if options.json:
        print(json.dumps({"models": [asdict(model) for model in models], "above": above, "enough": enough}, indent=2))
        return not enough and not options.smoke
    for model in models:
        size = f"{model.parameters:,} parameters, {model.forward_macs / 1e6:.2f} M multiplications"
        print(
            f"{model.name}: {100 * model.accuracy:.1f} % "
            f"({size}, learning rate {model.learning_rate:g}, {model.seconds:.0f} s)"
        )
    for name, difference in above.items():
        print(
            f"largest minus {name}: {100 * difference:+.1f} points, {'enough' if difference >= LEAST else 'too little'}"
        )
    return not enough and not options.smoke


if __name__ == "__main__":
    sys.exit(main())
