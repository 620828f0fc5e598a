"""What the server's loop does at most in one step, with a thousand members, and what a heartbeat costs.

python benchmarks/coordinator.py                        # every method, default settings; prints tables
python benchmarks/coordinator.py --json                 # ends with one JSON object
python benchmarks/coordinator.py --methods fedavg fjord # some of them
python benchmarks/coordinator.py --write                # and writes benchmarks/results/coordinator.md
python benchmarks/coordinator.py --spoil                # searches within a step, and copies all members: has to fail

The pure coordinator is driven by simulated devices and an exporter that has everything at once: two rounds and the
deployment of a ResNet-18, one round without any program and one after it. Prices are the exporter's own. What is made
beside the loop is counted apart. Seconds are those of the processor, of one thread.

The exit status is 1 where a step took more than 50 ms, or where a heartbeat costs more among 10,000 members than 1.5
times what it costs among 100, in the coordinator or in the whole server.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from coordinator_benchmark.heartbeats import bytes_per_member, heartbeat_us, server_heartbeat_us
from coordinator_benchmark.steps import StepFigures, step_figures

from subfleet import tasks
from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.elastic.network import Family
from subfleet.export.pricing.model import PriceModel
from subfleet.methods import METHODS
from subfleet.programs.requests import train_request
from subfleet.protocol.subnet import SubnetSpec
from subfleet.serving.terms import terms_of
from subfleet.settings.evaluations import Evaluations
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings

RESULTS = Path(__file__).parent / "results" / "coordinator.md"
MODEL = PreactResNet(input_shape=(3, 32, 32), class_count=10, widths=(64, 128, 256, 512), depths=(2, 2, 2, 2))
SMALL = Mlp(input_shape=(4,), class_count=2, widths=(4,), depths=(1,), group_size=2)
MEMBERS, FEW, MANY = 1000, 100, 10_000
MOST_MS, MOST_TIMES = 50.0, 1.5
HEAD = f"""# Steps of the loop

`python benchmarks/coordinator.py --write`, Python {platform.python_version()}, {platform.machine()}, \
{os.cpu_count()} cores, CPU of one thread.

{MEMBERS} simulated members, default settings of every method, a ResNet-18 for images of 32x32. *No programs* is the
first round, *programs* all that follows. *Beside* is what a thread of its own searches, and the loop does not wait for.
A step may take {MOST_MS:g} ms.

| method | worst step, no programs, ms | programs, ms | the worst is | mean, ms | steps | beside, s |
|---|---:|---:|---|---:|---:|---:|
"""


def config_of(method: str, members: int, *, model: Family = MODEL, evaluation: str = "none") -> Run:
    """A run with the method's default settings, for devices with ONNX Runtime."""
    return Run(
        name="loop",
        model=model,
        data=DataSettings(test=evaluation),
        rounds=2,
        min_clients=members,
        method=METHODS[method](),
        evaluation=Evaluations(every=1),
        targets=("onnx",),
        deploy_targets=("onnx",),
    )


def prices_of(config: Run) -> MemoryPrices:
    """What the exporter's workers would tell."""
    network = network_of(config.model)
    training = config.policies.training(config.training_of(1), 1)
    return PriceModel(network, train_request(network, SubnetSpec(), "onnx", training)).prices


def row_of(name: str, found: StepFigures) -> str:
    """A line of the table."""
    first, later = found.worst_ms
    return (
        f"| {name} | {first:.1f} | {later:.1f} | {found.of} | {found.mean_ms:.2f} | {found.steps} "
        f"| {found.beside_s:.1f} |"
    )


def beats(*, spoil: bool) -> dict[str, dict[str, float]]:
    """Microseconds of a heartbeat among few and among many members, in the coordinator and in the whole server."""
    found: dict[str, dict[str, float]] = {"heartbeat_us": {}, "server_heartbeat_us": {}}
    with tempfile.TemporaryDirectory(prefix="subfleet-") as scratch:
        folder = Path(scratch)
        samples = tasks.Dataset(inputs=np.zeros((4, 4), np.float32), labels=np.zeros(4, np.int64))
        tasks.write_npz(folder / "evaluation.npz", samples)
        for count in (FEW, MANY):
            config = config_of("fedavg", 10 * MANY, model=SMALL, evaluation=str(folder / "evaluation.npz"))
            terms = terms_of(config, "loop")
            found["heartbeat_us"][str(count)] = heartbeat_us(terms, count, spoil=spoil)
            found["server_heartbeat_us"][str(count)] = server_heartbeat_us(config, terms, count, folder / str(count))
    return found


def table_of(found: dict[str, dict[str, float]], held: float) -> list[str]:
    """What heartbeats cost, in lines."""
    return [
        "",
        f"| a heartbeat | among {FEW} members, us | among {MANY}, us |",
        "|---|---:|---:|",
        *(
            f"| {words} | {found[key][str(FEW)]:.0f} | {found[key][str(MANY)]:.0f} |"
            for key, words in (("heartbeat_us", "in the coordinator"), ("server_heartbeat_us", "in the whole server"))
        ),
        "",
        f"A member takes {held:.0f} bytes of the state, its profile included.",
    ]


def problems(worst_ms: dict[str, float], found: dict[str, dict[str, float]]) -> list[str]:
    """What is not as it has to be."""
    slow = [f"a step of {name} takes {took:.1f} ms" for name, took in worst_ms.items() if took > MOST_MS]
    dear = [
        f"{key} is {of[str(MANY)]:.0f} among {MANY} members and {of[str(FEW)]:.0f} among {FEW}"
        for key, of in found.items()
        if of[str(MANY)] > MOST_TIMES * of[str(FEW)]
    ]
    return [*slow, *dear]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--spoil", action="store_true", help="plant an error")
    chosen = parser.parse_args(arguments)
    print(HEAD, end="")
    lines, worst_ms = [], dict[str, float]()
    prices = {"onnx": prices_of(config_of("fedavg", MEMBERS))}
    for name in chosen.methods:
        terms = terms_of(config_of(name, MEMBERS), "loop")
        found = step_figures(terms, prices, members=MEMBERS, spoil=chosen.spoil)
        if found.folded < terms.config.rounds:
            print(f"{name} has folded {found.folded} rounds of {terms.config.rounds}", file=sys.stderr)
            return 1
        worst_ms[name] = max(found.worst_ms)
        lines.append(row_of(name, found))
        print(lines[-1], flush=True)
    heard, held = beats(spoil=chosen.spoil), bytes_per_member(terms_of(config_of("fedavg", MEMBERS), "loop"), MANY)
    last = table_of(heard, held)
    print("\n".join(last))
    wrong = problems(worst_ms, heard)
    if chosen.write:
        RESULTS.write_text(HEAD + "\n".join([*lines, *last]) + "\n")
    if chosen.json:
        print(json.dumps({"worst_step_ms": worst_ms, **heard, "bytes_per_member": held}))
    for one in wrong:
        print(one, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
