"""The longest step of the server's loop with a thousand members, and the cost of a heartbeat.

python benchmarks/coordinator.py                        # every method, default settings; prints tables
python benchmarks/coordinator.py --json                 # ends with one JSON object
python benchmarks/coordinator.py --methods fedavg fjord # some of them
python benchmarks/coordinator.py --write                # and writes benchmarks/results/coordinator.md
python benchmarks/coordinator.py --smoke                # checks that it runs, in seconds
python benchmarks/coordinator.py --spoil                # searches within a step, and copies all members: must fail

The pure coordinator is driven by simulated devices and an exporter that answers at once: two rounds and the deployment
of a ResNet-18, one round without any program and one after it. Cost estimates are the exporter's own. Work beside the
loop is counted separately. Seconds are CPU time of one thread.

The exit status is 1 if a step took more than 50 ms, or if a heartbeat among 10,000 members costs more than 1.5 times
as much as among 100, in the coordinator or in the whole server.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from coordinator_benchmark.fleet import EstimatesOf
from coordinator_benchmark.heartbeats import measure_bytes_per_member, measure_heartbeat_us, measure_server_heartbeat_us
from coordinator_benchmark.steps import StepFigures, measure_steps
from pages import write_page

from subfleet import tasks
from subfleet.elastic.families.presets import cnn_l
from subfleet.elastic.families.records.choices import ChoiceCnn
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Family, Network
from subfleet.export.estimation.model import EstimateModel
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.fedoras import FedorAS
from subfleet.programs.supply import build_train_request
from subfleet.protocol.training import TrainingSettings
from subfleet.serving.run_context import create_context
from subfleet.serving.session import freeze_loaded_objects
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import Evaluations

RESULTS = Path(__file__).parent / "results" / "coordinator.md"
MODEL: Family = PreactResNet(input_shape=(3, 32, 32), class_count=10, widths=(64, 128, 256, 512), depths=(2, 2, 2, 2))
SMALL: Family = Mlp(input_shape=(4,), class_count=2, widths=(4,), depths=(1,), group_size=2)
SUPERNET: Family = cnn_l.settings
"""Settings of methods that draw paths."""
SMALL_SUPERNET: Family = ChoiceCnn(input_shape=(1, 8, 8), class_count=2, widths=(8,), depths=(1,), last_widths=(16,))
ENTRANTS: Mapping[str, AnyMethod] = MappingProxyType(
    {
        **{name: kind() for name, kind in METHODS.items()},
        # By default its search begins after 500 rounds, here after the first.
        "fedoras, searching": FedorAS(supernet_rounds=1),
    }
)
MEMBERS, FEW, MANY = 1000, 100, 10_000
SMOKE_MEMBERS, SMOKE_FEW, SMOKE_MANY = 20, 10, 100
MOST_MS, MOST_TIMES = 50.0, 1.5
HEAD = f"""# Steps of the loop

`python benchmarks/coordinator.py --write`, Python {platform.python_version()}, {platform.machine()}, \
{os.cpu_count()} cores, CPU of one thread.

{MEMBERS} simulated members, default settings of every method, a ResNet-18 for images of 32x32. *No programs* is the
first round, *programs* all later ones. *Beside* is the time of searches in another thread, for which the loop does not
wait. A step may take {MOST_MS:g} ms.

| method | worst step, no programs, ms | programs, ms | the worst is | mean, ms | steps | beside, s |
|---|---:|---:|---|---:|---:|---:|
"""


def create_run(method: AnyMethod, members: int, *, small: bool = False, evaluation: str = "none") -> Run:
    """A run for devices with ONNX Runtime; a method that draws paths gets a supernet."""
    supernet = method.roles().training.draws_paths
    model, choices = (SMALL, SMALL_SUPERNET) if small else (MODEL, SUPERNET)
    return Run(
        name="loop",
        model=choices if supernet else model,
        data=DataSettings(test=evaluation, validation_samples=int(supernet)),
        rounds=2,
        min_clients=members,
        method=method,
        evaluation=Evaluations(every=1),
        targets=("onnx",),
        deploy_targets=("onnx",),
    )


def create_exporter() -> EstimatesOf:
    """A substitute for the exporter's workers, which estimates each network and its training once."""
    estimates: dict[str, MemoryEstimates] = {}

    def estimate(network: Network, training: TrainingSettings) -> MemoryEstimates:
        request = build_train_request(network, network.full_architecture(), "onnx", training)
        if request.program_id not in estimates:
            estimates[request.program_id] = EstimateModel(network, request).estimates
            freeze_loaded_objects()  # the exporter's objects are in other processes than the server's loop
        return estimates[request.program_id]

    return estimate


def format_row(name: str, figures: StepFigures) -> str:
    """The figures of a method as a table row."""
    first, later = figures.worst_ms
    return (
        f"| {name} | {first:.1f} | {later:.1f} | {figures.worst_step} | {figures.mean_ms:.2f} | {figures.steps} "
        f"| {figures.beside_s:.1f} |"
    )


def measure_heartbeats(counts: tuple[int, int], *, spoil: bool) -> dict[str, dict[str, float]]:
    """Measure a heartbeat among few and many members, in the coordinator and in the whole server (microseconds)."""
    costs_us: dict[str, dict[str, float]] = {"heartbeat_us": {}, "server_heartbeat_us": {}}
    with tempfile.TemporaryDirectory(prefix="subfleet-") as scratch:
        folder = Path(scratch)
        samples = tasks.Dataset(inputs=np.zeros((4, 4), np.float32), labels=np.zeros(4, np.int64))
        tasks.write_npz(folder / "evaluation.npz", samples)
        for count in counts:
            config = create_run(FedAvg(), 10 * max(counts), small=True, evaluation=str(folder / "evaluation.npz"))
            context = create_context(config, "loop")
            costs_us["heartbeat_us"][str(count)] = measure_heartbeat_us(context, count, spoil=spoil)
            costs_us["server_heartbeat_us"][str(count)] = measure_server_heartbeat_us(
                config, context, count, folder / str(count)
            )
    return costs_us


def build_heartbeat_table(
    counts: tuple[int, int], costs_us: dict[str, dict[str, float]], member_bytes: float
) -> list[str]:
    """The costs of heartbeats as lines of the page."""
    few, many = counts
    return [
        "",
        f"| a heartbeat | among {few} members, us | among {many}, us |",
        "|---|---:|---:|",
        *(
            f"| {label} | {costs_us[key][str(few)]:.0f} | {costs_us[key][str(many)]:.0f} |"
            for key, label in (("heartbeat_us", "in the coordinator"), ("server_heartbeat_us", "in the whole server"))
        ),
        "",
        f"A member takes {member_bytes:.0f} bytes of the state, its profile included.",
    ]


def find_problems(worst_ms: dict[str, float], heartbeats_us: dict[str, dict[str, float]]) -> list[str]:
    """List the broken bounds."""
    slow = [f"a step of {name} takes {step_ms:.1f} ms" for name, step_ms in worst_ms.items() if step_ms > MOST_MS]
    growing = [
        f"{key} is {costs_us[str(MANY)]:.0f} among {MANY} members and {costs_us[str(FEW)]:.0f} among {FEW}"
        for key, costs_us in heartbeats_us.items()
        if costs_us[str(MANY)] > MOST_TIMES * costs_us[str(FEW)]
    ]
    return [*slow, *growing]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = _parse_arguments(arguments)
    members, counts = (SMOKE_MEMBERS, (SMOKE_FEW, SMOKE_MANY)) if options.smoke else (MEMBERS, (FEW, MANY))
    print(HEAD, end="")
    lines, worst_ms, estimates = [], dict[str, float](), create_exporter()
    for name in options.methods:
        context = create_context(create_run(ENTRANTS[name], members, small=options.smoke), "loop")
        figures = measure_steps(context, estimates, members=members, spoil=options.spoil)
        if figures.aggregated < context.config.rounds:
            print(f"{name} has aggregated {figures.aggregated} rounds of {context.config.rounds}", file=sys.stderr)
            return 1
        worst_ms[name] = max(figures.worst_ms)
        lines.append(format_row(name, figures))
        print(lines[-1], flush=True)
    heartbeats_us = measure_heartbeats(counts, spoil=options.spoil)
    member_bytes = measure_bytes_per_member(create_context(create_run(FedAvg(), members), "loop"), max(counts))
    heartbeat_lines = build_heartbeat_table(counts, heartbeats_us, member_bytes)
    print("\n".join(heartbeat_lines))
    problems = [] if options.smoke else find_problems(worst_ms, heartbeats_us)
    if options.write:
        write_page(RESULTS, HEAD + "\n".join([*lines, *heartbeat_lines]) + "\n")
    if options.json:
        print(json.dumps({"worst_step_ms": worst_ms, **heartbeats_us, "bytes_per_member": member_bytes}))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=sorted(ENTRANTS), default=list(ENTRANTS))
    parser.add_argument("--smoke", action="store_true", help="a small fleet; times are not judged")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--spoil", action="store_true", help="plant an error")
    options = parser.parse_args(arguments)
    if options.write and (options.smoke or options.spoil):
        parser.error("--write takes a whole run as it is; leave out --smoke and --spoil")
    return options


if __name__ == "__main__":
    sys.exit(main())
