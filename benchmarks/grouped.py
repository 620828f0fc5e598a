"""Training steps a second of clients that train together, against one after the other, on one device.

python benchmarks/grouped.py                          # prints a table; a minute on one core
python benchmarks/grouped.py --clients 20 100 500 --device cuda --write   # benchmarks/results/grouped.md
python benchmarks/grouped.py --json                   # ends with one JSON object

A step is that of `host.numerics = "grouped"`: clients have weights and samples of their own. Both ways are timed in
turn, after a run that is not counted; figures are medians. Whatever a batch would choose, both are measured here.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pages import write_page
from smoke import parse_arguments
from torch import Tensor

from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.plain import Vgg
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.elastic.network import Family
from subfleet.emulation.batch.grouped_steps import make_group_step
from subfleet.export.request_steps import training_step_of
from subfleet.programs.supply import build_train_request
from subfleet.protocol.training import TrainingSettings

RESULTS = Path(__file__).parent / "results" / "grouped.md"
BATCH, MOST_ALONE = 32, 20
"""Samples of a step, and how many clients are timed one after the other."""
NETWORKS: dict[str, Family] = {
    "a CNN of 9,000 parameters on 28 x 28": Vgg(
        input_shape=(1, 28, 28), class_count=10, widths=(8, 16), depths=(1, 1), group_size=4
    ),
    "a ResNet of 175,000 parameters on 32 x 32": PreactResNet(
        input_shape=(3, 32, 32), class_count=10, widths=(16, 32, 64), depths=(2, 2, 2), group_size=4
    ),
}


def measure(network: Family, clients: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Client steps a second, together and one after the other."""
    elastic = network_of(network)
    request = build_train_request(
        elastic, elastic.full_architecture(), "torch", TrainingSettings(epochs=1, batch_size=BATCH)
    )
    step, generator = make_group_step(request, device), torch.Generator().manual_seed(0)
    example = training_step_of(request).example(generator)
    names = [value.name for value in training_step_of(request).inputs]
    values = {
        name: tensor.to(device).expand(clients, *tensor.shape).contiguous()
        for name, tensor in zip(names, example, strict=True)
    }
    alone = min(clients, MOST_ALONE)
    seconds: dict[str, list[float]] = {"together": [], "alone": []}
    for _ in range(repeats + 1):
        seconds["together"].append(_time(step.run, [values], device) / clients)
        rows = [{name: value[row : row + 1] for name, value in values.items()} for row in range(alone)]
        seconds["alone"].append(_time(step.run, rows, device) / alone)
    return {name: 1 / statistics.median(each[1:]) for name, each in seconds.items()}


def _time(run: Any, calls: list[dict[str, Tensor]], device: torch.device) -> float:
    started_s = time.perf_counter()
    with torch.no_grad():
        for values in calls:
            run(values)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def describe(rows: list[dict[str, Any]], device: str) -> str:
    """The figures as Markdown."""
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, one core"
    lines = [
        "# Clients that train together",
        "",
        f"`python benchmarks/grouped.py --device {device} --write`, {where}, torch {torch.__version__};",
        f"batches of {BATCH}.",
        "",
        "| network | clients | steps a second, one after the other | together | ratio |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {row['network']} | {row['clients']} | {row['alone']:.0f} | {row['together']:.0f} "
            f"| {row['together'] / row['alone']:.2f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[20], help="sizes of groups; default 20")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what computes; default cpu")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each; default 5")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parse_arguments(parser, clients=[2], repeats=1)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows: list[dict[str, Any]] = [
        {"network": name, "clients": count, **measure(network, count, device, options.repeats)}
        for name, network in NETWORKS.items()
        for count in options.clients
    ]
    text = describe(rows, options.device)
    sys.stdout.write(json.dumps({"device": options.device, "rows": rows}) + "\n" if options.json else text)
    if options.write:
        write_page(RESULTS, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
