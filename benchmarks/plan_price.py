#!/usr/bin/env python
"""Prices of random subnets against the exact plans of their programs, for every family of networks and target.

    python benchmarks/plan_price.py                      # 20 subnets of each family, as a table
    python benchmarks/plan_price.py --specs 200 --write --json

The networks are small, so that every subnet can also be planned exactly: there the runtime's own objects weigh most,
and a step of 64 KiB in which plans count them is already 1 to 3 %.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from subfleet.elastic.families import FAMILIES, network_of
from subfleet.elastic.network import ModelConfig, Network
from subfleet.export.pricing.model import PriceModel
from subfleet.export.pricing.running import run_step
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.subnet import Centre, IndexSet, Prefix, SubnetSpec
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

TARGETS = ("onnx", "executorch", "torch")
RESULTS = Path(__file__).resolve().parent / "results" / "plan-price.md"
BATCH_SIZE = 8
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found for a family and a target.

    Attributes:
        ratios: price over exact plan of each subnet.
        warm_ms: of each price that needed no recording, from the spec on.
        recorded: programs that were recorded.
        recording_s: seconds for each of them.
    """

    family: str
    target: str
    ratios: tuple[float, ...]
    warm_ms: tuple[float, ...]
    recorded: int
    recording_s: float

    def figures(self) -> Mapping[str, Any]:
        """For `--json`."""
        return {
            "specs": len(self.ratios),
            "least": min(self.ratios),
            "most": max(self.ratios),
            "below": sum(ratio < 1 for ratio in self.ratios),
            "above_5_percent": sum(ratio > 1.05 for ratio in self.ratios),
            "warm_ms": statistics.median(self.warm_ms) if self.warm_ms else None,
            "recorded": self.recorded,
            "recording_s": self.recording_s,
        }


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


def measure(config: ModelConfig, target: str, count: int) -> Row:
    """Price subnets, and plan them exactly."""
    network = network_of(config)
    chance = random.Random(config.family)  # noqa: S311 - no secret
    model = PriceModel(network, lambda spec: request_for(config, target, spec))
    ratios, warm_ms, recording_s = [], [], 0.0
    for _ in range(count):
        spec = random_spec(network, chance)
        recorded, started_s = model.recorded_count, time.perf_counter()
        price = model.memory_bytes(spec)
        took_s = time.perf_counter() - started_s
        if model.recorded_count == recorded:
            warm_ms.append(1000 * took_s)
        else:
            recording_s += took_s
        _, plan = run_step(training_step_of(request_for(config, target, spec)), target)
        ratios.append(price / plan.peak_bytes)
    return Row(
        family=config.family,
        target=target,
        ratios=tuple(ratios),
        warm_ms=tuple(warm_ms),
        recorded=model.recorded_count,
        recording_s=recording_s / max(model.recorded_count, 1),
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """In Markdown."""
    yield "| family | target | specs | least | most | below 1 | above 1.05 | ms a price | recorded | s a recording |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        found = row.figures()
        warm = "-" if found["warm_ms"] is None else f"{found['warm_ms']:.1f}"
        yield (
            f"| {row.family} | {row.target} | {found['specs']} | {found['least']:.4f} | {found['most']:.4f} "
            f"| {found['below']} | {found['above_5_percent']} | {warm} | {row.recorded} | {row.recording_s:.2f} |"
        )


ABOUT = """
Subnets are random in every axis and block. Least and most are of the price over the exact plan, which is that of the
written program. A price is put together from segments of recorded programs; *recorded* counts the programs that had to
be planned exactly for all prices of the row, *ms a price* is the median time of those that needed none, from the spec
on. Networks are small, which is the harder case for the ratio: 64 KiB, the step in which plans count the runtime's
objects, are 1 to 3 % of them.
"""


def write_results(rows: Sequence[Row], missing: Mapping[str, str], count: int) -> None:
    """Write the table with what its columns are."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "executorch", "torch"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    lines = [
        "# Prices of subnets against exact plans",
        "",
        f"`python benchmarks/plan_price.py --specs {count} --write`, {versions}, {machine}, one thread.",
        ABOUT,
        *table(rows),
    ]
    if missing:
        lines += ["", "Missing:", "", *(f"- {name}: {reason}" for name, reason in missing.items())]
    RESULTS.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", type=int, default=20, help="subnets of each family")
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only this one; may be repeated")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be repeated")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    rows: list[Row] = []
    missing = {}
    for family in arguments.family or sorted(FAMILIES):
        for target in arguments.target or TARGETS:
            try:
                rows.append(measure(NETWORKS[family], target, arguments.specs))
            except (KeyError, SubfleetError) as error:
                reason = "no small network is given here" if isinstance(error, KeyError) else str(error)
                missing[f"{family} on {target}"] = reason
                print(f"{family} on {target}: {reason}", file=sys.stderr, flush=True)
                continue
            print("\n".join([*table(rows)][0 if len(rows) == 1 else -1 :]), flush=True)
    if arguments.write:
        write_results(rows, missing, arguments.specs)
    if arguments.json:
        families: dict[str, Any] = {family: {} for family in FAMILIES}
        for row in rows:
            families[row.family][row.target] = row.figures()
        print(json.dumps({"families": families, "missing": missing}))


if __name__ == "__main__":
    main()
