"""Speed and memory of aggregating updates, compared with this machine's memory and with a plain PyTorch loop.

python benchmarks/aggregate.py                    # prints tables; minutes
python benchmarks/aggregate.py --json             # ends with one JSON object
python benchmarks/aggregate.py --threads 1 --clients 10 100
python benchmarks/aggregate.py --write            # and writes benchmarks/results/aggregate.md
python benchmarks/aggregate.py --device cuda --write       # the same on a GPU: benchmarks/results/gpu.md

The updates are float32 and of full width. A rate counts each byte of the updates once. The copy rate is that of
`Tensor.copy_` on tensors as large as all distinct updates together; it also counts each copied byte once, although a
copy reads and writes it. Both use the same threads and updates, in turn; medians.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from client_memory import read_resident_bytes
from pages import write_page
from smoke import parse_arguments
from torch import Tensor

from subfleet.elastic.accumulator import Accumulator, Contribution
from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.network import Family, Network

RESULTS = Path(__file__).parent / "results"
NETWORK: Family = PreactResNet(input_shape=(3, 32, 32), class_count=10, widths=(64, 128, 256, 512), depths=(2, 2, 2, 2))
"""ResNet-18: 11 million numbers in 60 tensors."""
SMALL: Family = Mlp(input_shape=(64,), class_count=2, widths=(64,), depths=(1,))
BATCH = 8
"""Updates that are in memory at a time, and are added to the sums together."""
CLIENTS = (10, 100, 1000)
REPEATS = 7
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes of updates per second for one number of clients."""

    clients: int
    copy_bps: float
    fold_bps: float
    single_bps: float
    loop_bps: float


def main() -> None:
    """Measure and print."""
    options = _parse_arguments()
    if options.peak is not None:
        print(measure_peak_growth(options.peak))
        return
    torch.set_num_threads(options.threads)
    if os.getloadavg()[0] > 0.5:
        _print_progress(f"the load average is {os.getloadavg()[0]:.1f}: rates of threads are not to be trusted")
    model = SMALL if options.smoke else NETWORK
    table = [measure_rates(network_of(model), count, torch.device(options.device)) for count in options.clients]
    # The memory of a GPU does not belong to the process.
    on_cpu = options.device == "cpu"
    peaks = {count: _measure_peak_in_process(count, options.threads) for count in options.clients if on_cpu}
    text = build_page(table, peaks, options.device)
    _print_progress(text)
    if options.write:
        path = RESULTS / ("aggregate.md" if on_cpu else "gpu.md")
        write_page(path, text)
    if options.json:
        print(json.dumps(summarise(table, peaks)))


def measure_rates(network: Network, clients: int, device: torch.device) -> Rates:
    """Time a copy, aggregation in batches, aggregation one by one and a plain loop, in turn."""
    state, updates = draw_model(network, device), draw_updates(network, device)
    source = torch.cat([tensor.reshape(-1) for update in updates for tensor in update.values()])
    target = torch.empty_like(source)
    runs: dict[str, Callable[[int], object]] = {
        "copy": lambda _: target.copy_(source),
        "aggregate": lambda count: aggregate(network, state, updates, count, BATCH),
        "single": lambda count: aggregate(network, state, updates, count, 1),
        "loop": lambda count: aggregate_in_loop(state, updates, count),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(BATCH)
    # A copy is short: one runs before each of the others, so that all see the same load of the machine.
    for name in ("aggregate", "copy", "single", "copy", "loop", "copy") * max(1, REPEATS * CLIENTS[0] // clients):
        seconds[name].append(_measure_seconds(partial(runs[name], clients), device))
    bps = {
        name: (BATCH if name == "copy" else clients) * source.nbytes / BATCH / statistics.median(times_s)
        for name, times_s in seconds.items()
    }
    return Rates(
        clients=clients, copy_bps=bps["copy"], fold_bps=bps["aggregate"], single_bps=bps["single"], loop_bps=bps["loop"]
    )


def aggregate(
    network: Network, state: dict[str, Tensor], updates: list[dict[str, Tensor]], clients: int, batch: int
) -> None:
    """Aggregate a round without its first model: the sums and the new model."""
    architecture = network.full_architecture()
    accumulator = Accumulator(network, state, total_weight=clients)
    for start in range(0, clients, batch):
        members = range(start, min(start + batch, clients))
        accumulator.add_many(
            [Contribution(architecture=architecture, change=updates[client % BATCH], weight=1.0) for client in members]
        )
    accumulator.finish()


def aggregate_in_loop(state: dict[str, Tensor], updates: list[dict[str, Tensor]], clients: int) -> None:
    """Aggregate as public code does: weighted sums and sums of weights, tensor by tensor."""
    numerators = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    denominators = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for client in range(clients):
        for name, tensor in updates[client % BATCH].items():
            numerators[name] += 1.0 * tensor
            denominators[name] += 1.0
    for name, tensor in state.items():
        torch.where(denominators[name] > 0, tensor + numerators[name] / denominators[name].clamp(min=1), tensor)


def draw_model(network: Network, device: torch.device) -> dict[str, Tensor]:
    """Draw a model of random numbers."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(decl.shape, generator=generator) * 0.05).to(device) for name, decl in network.tensors.items()
    }


def draw_updates(network: Network, device: torch.device) -> list[dict[str, Tensor]]:
    """Draw one batch of distinct updates, far larger than caches; further clients send the same ones."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            name: (torch.randn(decl.shape, generator=generator) * 0.01).to(device)
            for name, decl in network.tensors.items()
        }
        for _ in range(BATCH)
    ]


def measure_peak_growth(clients: int) -> int:
    """Peak growth of this process's resident memory during a round, without model and updates."""
    cpu = torch.device("cpu")
    # Code that a process compiles once does not count for a round.
    tiny = network_of(Mlp(input_shape=(1024,), class_count=2, widths=(1024,), depths=(1,)))
    aggregate(tiny, draw_model(tiny, cpu), draw_updates(tiny, cpu), 1, 1)
    network = network_of(NETWORK)
    state, updates = draw_model(network, cpu), draw_updates(network, cpu)
    before = read_resident_bytes("VmRSS")
    aggregate(network, state, updates, clients, BATCH)
    return read_resident_bytes("VmHWM") - before


def summarise(table: list[Rates], peaks: dict[int, int]) -> dict[str, float]:
    """The rates for the largest number of clients, and the peaks for few and for many."""
    last = table[-1]
    return {
        "fraction_of_memcpy": round(last.fold_bps / last.copy_bps, 3),
        "speedup_over_loop": round(last.fold_bps / last.loop_bps, 2),
        **{f"peak_bytes_{count}": peaks[count] for count in peaks if count in {10, 1000}},
    }


def build_page(table: list[Rates], peaks: dict[int, int], device: str) -> str:
    """The results as a Markdown page."""
    model_bytes = 4 * network_of(NETWORK).parameter_count(network_of(NETWORK).full_architecture())
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {_find_processor()}"
    lines = [
        f"# Aggregation updates on {'a GPU' if device == 'cuda' else 'the CPU'}",
        "",
        f"`python benchmarks/aggregate.py --device {device} --threads {torch.get_num_threads()} --write`,",
        (
            f"Python {platform.python_version()}, torch {torch.__version__}, numba {version('numba')}, {where}, "
            f"{torch.get_num_threads()} thread(s). ResNet-18, {model_bytes / 1e6:.1f} MB in float32."
        ),
        "",
        "| clients | copy GB/s | aggregate GB/s | aggregate / copy | one by one / copy | aggregate / loop | peak MB |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rates in table:
        peak = f"{peaks[rates.clients] / 1e6:.0f}" if rates.clients in peaks else "-"
        lines.append(
            f"| {rates.clients} | {rates.copy_bps / GIGABYTE:.1f} | {rates.fold_bps / GIGABYTE:.1f} "
            f"| {rates.fold_bps / rates.copy_bps:.2f} | {rates.single_bps / rates.copy_bps:.2f} "
            f"| {rates.fold_bps / rates.loop_bps:.1f} | {peak} |"
        )
    return "\n".join(lines) + "\n"


def _measure_peak_in_process(clients: int, threads: int) -> int:
    command = [sys.executable, __file__, "--peak", str(clients), "--threads", str(threads)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _find_processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def _measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    started_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help="write the pages of results")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    return parse_arguments(parser, clients=[CLIENTS[0]], threads=1)


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
