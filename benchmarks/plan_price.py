#!/usr/bin/env python
"""Prices of random subnets against the exact plans of their programs, for every family of networks and target.

    python benchmarks/plan_price.py                      # 20 subnets of each family, as a table
    python benchmarks/plan_price.py --specs 200 --target onnx --rows rows.jsonl
    python benchmarks/plan_price.py --specs 0 --rows rows.jsonl --write
    python benchmarks/plan_price.py --space 200 --target onnx      # how many programs a search has to record

Each family's row is added to the file of rows as soon as it is found, and not measured again where the file has it with
as many subnets, so that a long run can be cut short and split. The page is written of all rows in the file.

The networks are small, so that every subnet can also be planned exactly: there the runtime's own objects weigh most,
and a step of 64 KiB in which plans count them is already 1 to 3 %.
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from subfleet.elastic.families import FAMILIES, network_of
from subfleet.elastic.network import ModelConfig, Network
from subfleet.elastic.spaces import search_space
from subfleet.export.pricing.model import PriceModel
from subfleet.export.pricing.running import run_step
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.protocol.subnet import Centre, IndexSet, Prefix, SubnetSpec
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

TARGETS = ("onnx", "executorch", "torch")
RESULTS = Path(__file__).resolve().parent / "results" / "plan-price.md"
BATCH_SIZE = 8
REMARKS = "## Remarks\n"
_MOST = 1.05
_DRAWS = 20
"""Of random subnets for each that is wanted, before it is held that there are no others."""
PER_TOKEN = frozenset({"decoder", "bert", "lstm"})

NETWORKS = {
    config.family: config
    for config in (
        ModelConfig(family="mlp", input_shape=(32,), class_count=10, widths=(32, 16), depths=(3, 2)),
        ModelConfig(family="preact_resnet", input_shape=(3, 12, 12), class_count=10, widths=(16, 32), depths=(2, 2)),
        ModelConfig(
            family="vgg", input_shape=(3, 12, 12), class_count=10, widths=(16, 32), depths=(2, 2), norm="batch"
        ),
        ModelConfig(
            family="mobilenet_v2",
            input_shape=(3, 12, 12),
            class_count=10,
            widths=(8, 16),
            depths=(1, 2),
            hidden_widths=(16, 24, 32),
            strides=(1, 2),
            stem_width=8,
            last_widths=(32,),
        ),
        ModelConfig(
            family="mobilenet_v3",
            input_shape=(3, 12, 12),
            class_count=10,
            widths=(8, 16),
            depths=(1, 2),
            norm="batch",
            hidden_widths=(16, 24, 32),
            squeezed_widths=(4, 0, 8),
            kernels=(3, 5),
            strides=(1, 2),
            stem_width=8,
            last_widths=(32, 24),
        ),
        ModelConfig(
            family="efficientnet_v2",
            input_shape=(3, 12, 12),
            class_count=10,
            widths=(8, 16),
            depths=(2, 2),
            norm="batch",
            hidden_widths=(16, 16, 24, 32),
            squeezed_widths=(0, 4),
            kernels=(3, 3),
        ),
        ModelConfig(
            family="ds_cnn",
            input_shape=(1, 20, 10),
            class_count=10,
            widths=(16, 16),
            depths=(2, 2),
            norm="batch",
            stem_width=16,
        ),
        ModelConfig(
            family="vit",
            input_shape=(3, 12, 12),
            patch=4,
            class_count=10,
            widths=(16,),
            depths=(2,),
            heads=(4,),
            norm="layer",
        ),
        ModelConfig(
            family="bert",
            input_shape=(12,),
            vocabulary=20,
            class_count=20,
            widths=(16,),
            depths=(2,),
            heads=(4,),
            norm="layer",
        ),
        ModelConfig(
            family="bert_classifier",
            input_shape=(12,),
            vocabulary=20,
            class_count=4,
            widths=(16,),
            depths=(2,),
            heads=(4,),
            norm="layer",
        ),
        ModelConfig(
            family="decoder",
            input_shape=(12,),
            vocabulary=20,
            class_count=20,
            widths=(16,),
            depths=(2,),
            heads=(4,),
            norm="layer",
        ),
        ModelConfig(
            family="lstm",
            input_shape=(8,),
            vocabulary=20,
            class_count=20,
            widths=(16, 12),
            depths=(1, 1),
            norm="none",
        ),
    )
}
"""A small network of each family."""
RESNET = ModelConfig(
    family="preact_resnet",
    input_shape=(3, 32, 32),
    class_count=10,
    widths=(64, 128, 256, 512),
    depths=(2, 2, 2, 2),
    group_size=16,
)
RATIOS = (0.25, 0.5, 0.75, 1.0)
_STEP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found for a family and a target.

    Attributes:
        specs: different subnets that were priced.
        least: price over exact plan.
        most: price over exact plan.
        below: subnets with a price below the exact plan.
        above: subnets with a price more than 5 % above it.
        warm_ms: of a price that needed no recording, from the spec on; the median, None where every price needed one.
        recorded: programs that were recorded.
    """

    family: str
    target: str
    specs: int
    least: float
    most: float
    below: int
    above: int
    warm_ms: float | None
    recorded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRow:
    """How far a search's space is known after so many prices.

    Attributes:
        target: that was priced.
        subnets: in the space.
        priced: random ones, so far.
        recorded: programs for them.
        told: of those priced, without a recording.
        told_ms: for each of these, the median; None where there are none.
    """

    target: str
    subnets: int
    priced: int
    recorded: int
    told: int
    told_ms: float | None


def random_spec(network: Network, chance: random.Random) -> SubnetSpec:
    """Every axis at any of its sizes, and any of the blocks."""
    axes: list[tuple[str, IndexSet]] = []
    for name, axis in sorted(network.axes.items()):
        if axis.kind == "kernel":
            axes.append((name, Centre(size=chance.randrange(2 - axis.size % 2, axis.size + 1, 2))))
        elif axis.kind != "class":
            axes.append((name, Prefix(size=chance.randrange(axis.granularity, axis.size + 1, axis.granularity))))
    return SubnetSpec(axes=tuple(axes), blocks=tuple(block.name for block in network.blocks if chance.random() < 0.6))


def request_for(config: ModelConfig, target: str, spec: SubnetSpec) -> TrainRequest:
    """Momentum, small batches, and the family's objective."""
    return TrainRequest(
        model=config,
        spec=spec,
        target=target,
        batch_size=BATCH_SIZE,
        objective=ObjectiveSettings(name="next_token" if config.family in PER_TOKEN else "cross_entropy"),
        optimiser=OptimiserSettings(momentum=0.9),
    )


def different_specs(network: Network, count: int, chance: random.Random) -> Iterator[SubnetSpec]:
    """Random subnets of different shapes; fewer where there are not so many."""
    seen: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()
    for _ in range(_DRAWS * count):
        spec = random_spec(network, chance)
        shapes = tuple(network.shapes(spec).items())
        if shapes not in seen:
            seen.add(shapes)
            yield spec
        if len(seen) == count:
            return


def measure(config: ModelConfig, target: str, count: int) -> Row:
    """Price subnets, and plan them exactly."""
    network = network_of(config)
    model = PriceModel(network, lambda spec: request_for(config, target, spec))
    ratios, warm_ms = [], []
    for spec in different_specs(network, count, random.Random(config.family)):  # noqa: S311 - no secret
        recorded, started_s = model.recorded_count, time.perf_counter()
        price = model.memory_bytes(spec)
        took_s = time.perf_counter() - started_s
        if model.recorded_count == recorded:
            warm_ms.append(1000 * took_s)
        _, plan = run_step(training_step_of(request_for(config, target, spec)), target)
        ratios.append(price / plan.peak_bytes)
        if not 1 <= ratios[-1] <= _MOST:
            print(f"{config.family} on {target}: {ratios[-1]:.4f} for {spec}", file=sys.stderr, flush=True)
    return Row(
        family=config.family,
        target=target,
        specs=len(ratios),
        least=min(ratios),
        most=max(ratios),
        below=sum(ratio < 1 for ratio in ratios),
        above=sum(ratio > _MOST for ratio in ratios),
        warm_ms=statistics.median(warm_ms) if warm_ms else None,
        recorded=model.recorded_count,
    )


def count_recordings(target: str, count: int) -> Iterator[SpaceRow]:
    """How many programs are recorded until so many random subnets of ResNet-18 have a price."""
    space = search_space(network_of(RESNET), RATIOS)
    model = PriceModel(space.network, lambda spec: request_for(RESNET, target, spec))
    chance = random.Random(RESNET.family)  # noqa: S311 - no secret
    told_ms: list[float] = []
    for priced in range(1, count + 1):
        spec = space.spec(tuple(chance.randrange(len(gene.options)) for gene in space.genes))
        recorded, started_s = model.recorded_count, time.perf_counter()
        model.memory_bytes(spec)
        if model.recorded_count == recorded:
            told_ms.append(1000 * (time.perf_counter() - started_s))
        if priced % _STEP == 0 or priced == count:
            yield SpaceRow(
                target=target,
                subnets=space.count(),
                priced=priced,
                recorded=model.recorded_count,
                told=len(told_ms),
                told_ms=statistics.median(told_ms) if told_ms else None,
            )


def price_space(arguments: argparse.Namespace) -> None:
    """Print each row as soon as it is found."""
    rows = []
    for target in arguments.target or TARGETS:
        for row in count_recordings(target, arguments.space):
            warm = "" if row.told_ms is None else f", each in {row.told_ms:.0f} ms"
            print(f"{target}: {row.priced} priced, {row.recorded} recorded, {row.told} told without{warm}", flush=True)
            rows.append(asdict(row))
    if arguments.json:
        print(json.dumps(rows))


def rows_in(path: Path) -> dict[tuple[str, str], Row]:
    """The rows of a file, by family and target; of several, the last."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = (Row(**json.loads(line)) for line in lines)
    return {(row.family, row.target): row for row in rows}


def table(rows: Iterable[Row]) -> Iterator[str]:
    """In Markdown."""
    yield "| family | target | specs | least | most | below 1 | above 1.05 | ms a price | recorded |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        warm = "-" if row.warm_ms is None else f"{row.warm_ms:.1f}"
        yield (
            f"| {row.family} | {row.target} | {row.specs} | {row.least:.4f} | {row.most:.4f} "
            f"| {row.below} | {row.above} | {warm} | {row.recorded} |"
        )


ABOUT = """
Subnets are random in every axis and block. Least and most are of the price over the exact plan, which is that of the
written program. A price is put together from segments of recorded programs; *recorded* counts the programs that had to
be planned exactly for all prices of the row, *ms a price* is the median time of those that needed none, from the spec
on. Networks are small, which is the harder case for the ratio: 64 KiB, the step in which plans count the runtime's
objects, are 1 to 3 % of them.
"""


def write_results(rows: Iterable[Row]) -> None:
    """Write the table with what its columns are; what stands below it is kept."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "executorch", "torch"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    below = RESULTS.read_text().partition(REMARKS)[2] if RESULTS.exists() else ""
    lines = [
        "# Prices of subnets against exact plans",
        "",
        "`python benchmarks/plan_price.py --specs N --target T --rows rows.jsonl` with the numbers and targets of the",
        f"table, {versions}, {machine}, one thread.",
        ABOUT,
        *table(rows),
        "",
    ]
    RESULTS.write_text("\n".join(lines) + (f"\n{REMARKS}{below}" if below else ""))


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", type=int, default=20, help="subnets of each family; 0 measures nothing")
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only this one; may be repeated")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be repeated")
    parser.add_argument("--space", type=int, metavar="N", help="price N subnets of ResNet-18 instead of the families'")
    parser.add_argument("--rows", type=Path, help="a file of rows: those that it has are not measured again")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    if arguments.space is not None:
        if arguments.space < 1 or arguments.family or arguments.rows or arguments.write:
            parser.error("--space takes a number of 1 or more, and neither --family nor --rows nor --write")
        price_space(arguments)
        return
    found = rows_in(arguments.rows) if arguments.rows else {}
    for family, target in itertools.product(arguments.family or sorted(FAMILIES), arguments.target or TARGETS):
        known = found.get((family, target))
        if arguments.specs == 0 or (known and known.specs >= arguments.specs):
            continue
        row = found[family, target] = measure(NETWORKS[family], target, arguments.specs)
        print([*table([row])][-1], flush=True)
        if arguments.rows:
            with arguments.rows.open("a") as rows:
                rows.write(json.dumps(asdict(row)) + "\n")
    in_order = [found[key] for key in sorted(found, key=lambda key: (TARGETS.index(key[1]), key[0]))]
    if arguments.write:
        write_results(in_order)
    if arguments.json:
        print(json.dumps([asdict(row) for row in in_order]))


if __name__ == "__main__":
    main()
