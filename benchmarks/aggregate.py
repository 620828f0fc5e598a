"""Speed and memory of aggregating updates, compared with this machine's memory and with a plain PyTorch loop.

python benchmarks/aggregate.py                    # prints tables; minutes
python benchmarks/aggregate.py --json             # ends with one JSON object
python benchmarks/aggregate.py --threads 1 --clients 10 100
python benchmarks/aggregate.py --write            # and writes benchmarks/results/aggregate.md
python benchmarks/aggregate.py --device cuda --write       # the same on a GPU: benchmarks/results/gpu.md

The updates are float32, in batches as a server's. A rate counts each byte of the updates once. The copy rate is that of
`Tensor.copy_` on tensors as large as eight updates of the whole network; it also counts each copied byte once, although
a copy reads and writes it. All use the same threads, in turn; medians. A round begins with what it knows of a submodel:
nothing.

- full: every client trains the whole network.
- prefix: 3/4, 1/2 and 1/4 of each width, in turn (HeteroFL).
- roll: half of each width, in a window that begins at another index for each of eight groups of clients (FedRolex).
- explicit: half of each width, and other indices for each client (Federated Dropout).
- mixed: these four in turn.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from client_memory import read_resident_bytes
from pages import write_page
from smoke import parse_arguments
from torch import Tensor

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.building import network_of
from subfleet.elastic.contributions import BATCH_BYTES, Contribution, split_batches
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.maps import TensorMap, tensor_maps
from subfleet.elastic.network import Family, Network
from subfleet.protocol.submodel import Architecture, Explicit, IndexSet, Prefix, Roll

RESULTS = Path(__file__).parent / "results"
NETWORK: Family = PreactResNet(input_shape=(3, 32, 32), class_count=10, widths=(64, 128, 256, 512), depths=(2, 2, 2, 2))
"""ResNet-18: 11 million numbers in 60 tensors."""
SMALL: Family = Mlp(input_shape=(64,), class_count=2, widths=(64,), depths=(1,))
COPIED = 8
"""Updates of the whole network that are copied at once."""
CLIENTS = (10, 100, 1000)
KINDS = ("full", "prefix", "roll", "explicit", "mixed")
REPEATS = 5
"""Up to 100 clients; with 1000 each takes seconds, and runs once."""
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes of updates per second for one kind of submodels and one number of clients."""

    kind: str
    clients: int
    copy_bps: float
    aggregate_bps: float
    single_bps: float
    loop_bps: float


Round = list[tuple[Architecture, dict[str, Tensor]]]
"""What each client trained, and its change."""


def main() -> None:
    """Measure and print."""
    options = _parse_arguments()
    if options.peak is not None:
        print(measure_peak_growth(options.peak))
        return
    torch.set_num_threads(options.threads)
    gc.freeze()  # as a server does: PyTorch's own objects would be scanned again and again
    if os.getloadavg()[0] > 0.5:
        _print_progress(f"the load average is {os.getloadavg()[0]:.1f}: rates of threads are not to be trusted")
    network, device = network_of(SMALL if options.smoke else NETWORK), torch.device(options.device)
    table = [measure_rates(network, kind, count, device) for kind in KINDS for count in options.clients]
    # The memory of a GPU does not belong to the process.
    on_cpu = options.device == "cpu"
    peaks = {count: _measure_peak_in_process(count, options.threads) for count in options.clients if on_cpu}
    text = build_page(table, peaks, options.device)
    _print_progress(text)
    if options.write:
        path = RESULTS / ("aggregate.md" if on_cpu else "gpu.md")
        write_page(path, text)
    if options.json:
        print(json.dumps({**summarise(table, peaks), "max_error": measure_error(network)}))


def measure_rates(network: Network, kind: str, clients: int, device: torch.device) -> Rates:
    """Time a copy, aggregation in batches, aggregation one by one and a plain loop, in turn."""
    state, trained = draw_model(network, device), draw_round(network, kind, clients, device)
    source = torch.cat([state[name].reshape(-1) for name in state] * COPIED)
    target = torch.empty_like(source)
    maps = {architecture.architecture_id: tensor_maps(network, architecture) for architecture, _ in trained}
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "aggregate": lambda: aggregate(network, state, trained, list_batches(network, trained)),
        "single": lambda: aggregate(network, state, trained, [slice(at, at + 1) for at in range(clients)]),
        "loop": lambda: aggregate_in_loop(state, trained, maps),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    aggregate(network, state, trained[:COPIED], [slice(0, COPIED)])
    # A copy is short: one runs before each of the others, so that all see the same load of the machine.
    repeats = max(1, REPEATS * CLIENTS[1] // max(clients, CLIENTS[1]))
    for name in ("aggregate", "copy", "single", "copy", "loop", "copy") * repeats:
        seconds[name].append(_measure_seconds(runs[name], device))
    round_bytes = sum(tensor.nbytes for _, change in trained for tensor in change.values())
    bps = {
        name: (source.nbytes if name == "copy" else round_bytes) / statistics.median(times_s)
        for name, times_s in seconds.items()
    }
    return Rates(
        kind=kind,
        clients=clients,
        copy_bps=bps["copy"],
        aggregate_bps=bps["aggregate"],
        single_bps=bps["single"],
        loop_bps=bps["loop"],
    )


def list_batches(network: Network, trained: Round) -> list[slice]:
    """The batches that a server adds together."""
    return list(split_batches([network.parameter_count(architecture) for architecture, _ in trained]))


def aggregate(
    network: Network, state: dict[str, Tensor], trained: Round, batches: Sequence[slice]
) -> dict[str, Tensor]:
    """Aggregate a round: the sums and the new model."""
    accumulator = Accumulator(network, state, total_weight=len(trained))
    for batch in batches:
        accumulator.add_many(
            [
                Contribution(architecture=architecture, change=change, weight=1.0)
                for architecture, change in trained[batch]
            ]
        )
    return accumulator.finish()


def aggregate_in_loop(
    state: dict[str, Tensor], trained: Round, maps: Mapping[str, Mapping[str, TensorMap]]
) -> dict[str, Tensor]:
    """Aggregate as public code does: weighted sums and sums of weights, tensor by tensor."""
    numerators = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    denominators = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for architecture, change in trained:
        own = maps[architecture.architecture_id]
        for name, tensor in change.items():
            own[name].scatter(1.0 * tensor, numerators[name])
            own[name].scatter(torch.ones_like(tensor), denominators[name])
    return {
        name: torch.where(denominators[name] > 0, old + numerators[name] / denominators[name].clamp(min=1), old)
        for name, old in state.items()
    }


def measure_error(network: Network) -> float:
    """The largest difference of a mean from that in double precision, over the mean size of its changes."""
    cpu, clients = torch.device("cpu"), 2 * COPIED
    trained = draw_round(network, "mixed", clients, cpu)
    state = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
    new, worst = aggregate(network, state, trained, list_batches(network, trained)), 0.0
    for name, tensor in new.items():
        sums, sizes, counts = (torch.zeros(tensor.shape, dtype=torch.float64) for _ in range(3))
        for architecture, change in trained:
            own = tensor_maps(network, architecture)[name]
            for values, into in ((change[name], sums), (change[name].abs(), sizes), (change[name] * 0 + 1, counts)):
                own.scatter(values.double(), into)
        worst = max(
            worst, float(((tensor - sums / counts.clamp(min=1)).abs() / (sizes / counts).clamp(min=1e-30)).max())
        )
    return worst


def draw_round(network: Network, kind: str, clients: int, device: torch.device) -> Round:
    """Draw what each client of a round trained; those of one shape share changes, but none does within a batch."""
    drawn: dict[tuple[tuple[int, ...], ...], list[dict[str, Tensor]]] = {}
    generator, trained = torch.Generator().manual_seed(1), []
    for client in range(clients):
        architecture = draw_architecture(network, KINDS[client % 4] if kind == "mixed" else kind, client)
        shapes = network.shapes(architecture)
        own = drawn.setdefault(tuple(shapes.values()), [])
        if sum(tensor.nbytes for change in own for tensor in change.values()) < BATCH_BYTES:
            values = {name: torch.randn(shape, generator=generator) * 0.01 for name, shape in shapes.items()}
            own.append({name: tensor.to(device) for name, tensor in values.items()})
        trained.append((architecture, own[client % len(own)]))
    return trained


def draw_architecture(network: Network, kind: str, client: int) -> Architecture:
    """Draw the submodel of a client; it has all blocks."""
    rate, drawn = (3 - client % 3) / 4 if kind == "prefix" else 1 / 2, random.Random(client)  # noqa: S311 - no secret
    axes: list[tuple[str, IndexSet]] = []
    for name, axis in sorted(network.axes.items()):
        groups = axis.size // axis.granularity
        kept = max(1, int(rate * groups))
        if kind == "full" or axis.kind == "class":
            continue
        if kind == "prefix":
            axes.append((name, Prefix(size=kept * axis.granularity)))
        elif kind == "roll":
            axes.append((name, Roll(start=client % 8 * groups // 8 * axis.granularity, size=kept * axis.granularity)))
        else:
            chosen = sorted(drawn.sample(range(groups), kept))
            indices = (group * axis.granularity + own for group in chosen for own in range(axis.granularity))
            axes.append((name, Explicit(indices=tuple(indices))))
    return Architecture(axes=tuple(axes), blocks=tuple(block.name for block in network.blocks))


def draw_model(network: Network, device: torch.device) -> dict[str, Tensor]:
    """Draw a model of random numbers."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(decl.shape, generator=generator) * 0.05).to(device) for name, decl in network.tensors.items()
    }


def measure_peak_growth(clients: int) -> int:
    """Peak growth of this process's resident memory during a round, without model and updates."""
    cpu = torch.device("cpu")
    # Code that a process compiles once does not count for a round.
    tiny = network_of(Mlp(input_shape=(1024,), class_count=2, widths=(1024,), depths=(1,)))
    for kind in KINDS:
        aggregate(tiny, draw_model(tiny, cpu), draw_round(tiny, kind, COPIED, cpu), [slice(0, COPIED)])
    network = network_of(NETWORK)
    state, trained = draw_model(network, cpu), draw_round(network, "mixed", clients, cpu)
    before = read_resident_bytes("VmRSS")
    aggregate(network, state, trained, list_batches(network, trained))
    return read_resident_bytes("VmHWM") - before


def summarise(table: list[Rates], peaks: dict[int, int]) -> dict[str, object]:
    """The lower rates of 100 clients and more by kind, and the peaks for few and for many."""
    most = max(rates.clients for rates in table)
    many = [rates for rates in table if rates.clients >= min(100, most)]
    fractions, speedups = (
        {
            kind: round(min(rates.aggregate_bps / getattr(rates, other) for rates in many if rates.kind == kind), 3)
            for kind in KINDS
        }
        for other in ("copy_bps", "loop_bps")
    )
    return {
        "fraction_of_memcpy": fractions,
        "speedup_over_loop": speedups,
        **{f"peak_bytes_{count}": peaks[count] for count in peaks if count in {10, 1000}},
    }


def build_page(table: list[Rates], peaks: dict[int, int], device: str) -> str:
    """The results as a Markdown page."""
    model_bytes = 4 * network_of(NETWORK).parameter_count(network_of(NETWORK).full_architecture())
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {_find_processor()}"
    lines = [
        f"# Aggregation of updates on {'a GPU' if device == 'cuda' else 'the CPU'}",
        "",
        f"`python benchmarks/aggregate.py --device {device} --threads {torch.get_num_threads()} --write`,",
        (
            f"Python {platform.python_version()}, torch {torch.__version__}, numba {version('numba')}, {where}, "
            f"{torch.get_num_threads()} thread(s). ResNet-18, {model_bytes / 1e6:.1f} MB in float32."
        ),
        "",
        "| submodels | clients | copy GB/s | aggregate GB/s | of copy | one by one, of copy | aggregate / loop |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {rates.kind} | {rates.clients} | {rates.copy_bps / GIGABYTE:.1f} | {rates.aggregate_bps / GIGABYTE:.1f} "
        f"| {rates.aggregate_bps / rates.copy_bps:.2f} | {rates.single_bps / rates.copy_bps:.2f} "
        f"| {rates.aggregate_bps / rates.loop_bps:.1f} |"
        for rates in table
    ]
    if peaks:
        memory = ", ".join(f"{peak / 1e6:.0f} MB with {count}" for count, peak in peaks.items())
        lines += ["", f"Memory that a round takes beside the model and the updates, mixed submodels: {memory} clients."]
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
