#!/usr/bin/env python
"""Cost estimates of random submodels compared with the exact plans of their programs, for every family and target.

    python benchmarks/plan_estimate.py --plans plans.jsonl                     # 20 submodels of each family, as a table
    python benchmarks/plan_estimate.py --plans plans.jsonl --networks large --architectures 10 --target onnx
    python benchmarks/plan_estimate.py --plans plans.jsonl --architectures 0 --write       # judges the whole file
    python benchmarks/plan_estimate.py --plans plans.jsonl --architectures 0 --spoil 1.3   # must fail

Exact plans take 1 to 30 s each and do not depend on the model of cost estimates. So each is written to a file as soon
as it is made, and plans in the file are not made again: a long run can be interrupted and split. A file is valid for
one version of the exporter; delete it if plans have changed.

The exit status is 1 if a row breaks the bounds: half of its cost estimates within 6 % of the exact plan, 95 % within
12 %, all within 25 %. Times are reported and not judged; each row is timed in its own process, with one thread.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from pages import write_page
from plan_estimate_networks import TABLES, TINY, create_request, draw_architecture, draw_distinct_architectures
from smoke import parse_arguments

from subfleet.elastic.building import network_of
from subfleet.elastic.families import FAMILIES
from subfleet.elastic.network import Family, Network
from subfleet.export.estimation.model import EstimateModel
from subfleet.export.memory.step_bytes import add_gaps
from subfleet.export.request_steps import training_step_of
from subfleet.export.targets import find_target
from subfleet.export.targets.torch import plan_torch
from subfleet.export.tools import pause_garbage_collection
from subfleet.export.tracing import trace
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.submodel import Architecture, parse_architecture

TARGETS = ("onnx", "executorch", "torch")
RESULTS = Path(__file__).resolve().parent / "results" / "plan-estimate.md"
BOUNDS = ((0.06, 0.5), (0.12, 0.95), (0.25, 1.0))
"""Bounds on the error of a cost estimate, and the least fraction of each row's cost estimates within each."""
_TIMED = 5000
Case = tuple[str, str, str]
"""A row's table of networks, family and target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A line of the file of plans.

    Attributes:
        number: position of the submodel among the family's random ones.
        architecture: the submodel as canonical JSON.
    """

    networks: str
    family: str
    target: str
    number: int
    architecture: str
    exact_bytes: int

    @property
    def case(self) -> Case:
        """The case that it belongs to."""
        return self.networks, self.family, self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The errors for a family and a target: cost estimate over exact plan, minus 1.

    Attributes:
        architectures: different submodels that were estimated.
        ready_s: CPU seconds to make the cost estimate model.
        estimates_per_s: cost estimates per CPU second, many at once.
        median: median of the absolute error.
        percentile_95: its 95th percentile.
        worst: its maximum.
        least: the smallest signed error.
        most: the largest signed error.
        within_6: fraction of the cost estimates with an error of at most 6 %.
        within_12: the same for 12 %.
        within_25: the same for 25 %.
    """

    networks: str
    family: str
    target: str
    architectures: int
    ready_s: float
    estimates_per_s: float
    median: float
    percentile_95: float
    worst: float
    least: float
    most: float
    within_6: float
    within_12: float
    within_25: float

    @property
    def within_bounds(self) -> bool:
        """Whether enough cost estimates are within each bound."""
        fractions = (self.within_6, self.within_12, self.within_25)
        return all(share >= least for share, (_, least) in zip(fractions, BOUNDS, strict=True))


def find_family(case: Case) -> Family:
    """The network of a case."""
    networks, family, _ = case
    return TABLES[networks][family]


def draw_architectures(case: Case, count: int) -> list[Architecture]:
    """Draw the first submodels of a family; they are always the same."""
    config = find_family(case)
    return list(draw_distinct_architectures(network_of(config), count, random.Random(config.TYPE)))  # noqa: S311 - no secret


@pause_garbage_collection()
def plan_exact_bytes(case: Case, architecture: Architecture) -> int:
    """Write a submodel's program, and return its planned peak memory."""
    *_, name = case
    step = training_step_of(create_request(find_family(case), name, architecture))
    if name == "torch":
        return plan_torch(step, trace(step, {})).peak_bytes
    target = find_target(name)
    return add_gaps(target.write_training(trace(step, target.lowerings), step).memory, name).peak_bytes


def read_plans(path: Path | None) -> dict[tuple[Case, int], Plan]:
    """Read the plans of a file by case and number; the last one counts."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    plans = (Plan(**json.loads(line)) for line in lines)
    return {(plan.case, plan.number): plan for plan in plans}


def make_plans(cases: Sequence[Case], count: int, path: Path | None, plans: dict[tuple[Case, int], Plan]) -> None:
    """Make the missing plans, taking the cases in turn."""
    architectures = {case: draw_architectures(case, count) for case in cases}
    for number in range(count):
        for case in (case for case in cases if number < len(architectures[case])):
            text = canonical_json(architectures[case][number]).decode()
            known = plans.get((case, number))
            if known and known.architecture == text:
                continue
            started_s = time.perf_counter()
            plan_bytes = plan_exact_bytes(case, architectures[case][number])
            networks, family, target = case
            plan = plans[case, number] = Plan(
                networks=networks,
                family=family,
                target=target,
                number=number,
                architecture=text,
                exact_bytes=plan_bytes,
            )
            took_s = time.perf_counter() - started_s
            print(f"{family} on {target}, submodel {number}: {plan_bytes} bytes, {took_s:.1f} s", flush=True)
            if path:
                with path.open("a") as lines:
                    lines.write(json.dumps(asdict(plan)) + "\n")


def group_plans(plans: Iterable[Plan]) -> dict[Case, list[Plan]]:
    """Group plans by case in order, without those of submodels that are no longer drawn."""
    groups: dict[Case, list[Plan]] = {}
    tables = list(TABLES)

    def order(plan: Plan) -> tuple[int, int, str, int]:
        return tables.index(plan.networks), TARGETS.index(plan.target), plan.family, plan.number

    for plan in sorted(plans, key=order):
        groups.setdefault(plan.case, []).append(plan)
    for case, group in groups.items():
        architectures = [
            canonical_json(architecture).decode() for architecture in draw_architectures(case, group[-1].number + 1)
        ]
        current = [
            plan
            for plan in group
            if plan.number < len(architectures) and plan.architecture == architectures[plan.number]
        ]
        if len(current) < len(group):
            left_out = len(group) - len(current)
            print(
                f"{' '.join(case)}: {left_out} plans are of other submodels and left out", file=sys.stderr, flush=True
            )
        groups[case] = current
    return {case: group for case, group in groups.items() if group}


def draw_timed_architectures(network: Network, family: str) -> list[Architecture]:
    """Draw different random submodels, repeated if there are too few."""
    chance = random.Random(f"{family}, timed")  # noqa: S311 - no secret
    different = list(dict.fromkeys(draw_architecture(network, chance) for _ in range(2 * _TIMED)))
    return (different * math.ceil(_TIMED / len(different)))[:_TIMED]


def measure_estimates(job: tuple[Case, tuple[str, ...]]) -> tuple[float, float, list[int]]:
    """Estimate submodels in a fresh process, after one of a tiny network.

    Args:
        job: the case, and the submodels as JSON.

    Returns:
        CPU seconds to make the model, cost estimates per CPU second, and the cost estimates.
    """
    (_, family, target), texts = job
    config = find_family(job[0])
    torch.set_num_threads(1)
    tiny = network_of(TINY)
    EstimateModel(tiny, create_request(TINY, target, Architecture())).estimates.memory_bytes(tiny, [Architecture()])
    network = network_of(config)
    started_s = time.process_time()
    estimates = EstimateModel(network, create_request(config, target, network.full_architecture())).estimates
    ready_s = time.process_time() - started_s
    architectures = draw_timed_architectures(network, family)
    started_s = time.process_time()
    estimates.memory_bytes(network, architectures)
    took_s = time.process_time() - started_s
    return (
        ready_s,
        len(architectures) / took_s,
        estimates.memory_bytes(network, [parse_architecture(text) for text in texts]),
    )


def build_row(plans: Sequence[Plan], measurement: tuple[float, float, list[int]], spoil: float) -> Row:
    """Compare cost estimates, every second one multiplied by `spoil`, with exact plans."""
    ready_s, estimates_per_s, estimates = measurement
    judged = [estimate * (1 if index % 2 else spoil) for index, estimate in enumerate(estimates)]
    errors = [estimate / plan.exact_bytes - 1 for estimate, plan in zip(judged, plans, strict=True)]
    sizes = sorted(abs(error) for error in errors)
    within_6, within_12, within_25 = (sum(size <= bound for size in sizes) / len(sizes) for bound, _ in BOUNDS)
    return Row(
        networks=plans[0].networks,
        family=plans[0].family,
        target=plans[0].target,
        architectures=len(sizes),
        ready_s=ready_s,
        estimates_per_s=estimates_per_s,
        median=statistics.median(sizes),
        percentile_95=sizes[math.ceil(0.95 * len(sizes)) - 1],
        worst=sizes[-1],
        least=min(errors),
        most=max(errors),
        within_6=within_6,
        within_12=within_12,
        within_25=within_25,
    )


def judge(plans: Mapping[Case, Sequence[Plan]], spoil: float) -> Iterator[Row]:
    """Yield the rows as they are computed."""
    jobs = [(case, tuple(plan.architecture for plan in group)) for case, group in plans.items()]
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for group, measurement in zip(plans.values(), pool.imap(measure_estimates, jobs, chunksize=1), strict=True):
            yield build_row(group, measurement, spoil)


HEAD = (
    "| family | target | submodels | ready s | a second | median | 95 % | worst | least | most | 6 % | 12 % | 25 % |",
    "|---|---|" + "---:|" * 11,
)


def format_row(row: Row) -> str:
    """A row in Markdown."""
    errors = f"{row.median:.1%} | {row.percentile_95:.1%} | {row.worst:.1%} | {row.least:+.1%} | {row.most:+.1%}"
    shares = f"{row.within_6:.0%} | {row.within_12:.0%} | {row.within_25:.0%}"
    times = f"{row.ready_s:.2f} | {row.estimates_per_s:,.0f}"
    return f"| {row.family} | {row.target} | {row.architectures} | {times} | {errors} | {shares} |"


ABOUT = """
Submodels are random in every axis and block. Errors are estimate over exact plan, minus 1; the exact plan is that of
the exported program. *Median*, *95 %* (the 95th percentile) and *worst* are of the absolute error, *least* and *most*
are signed; the last three columns are the fractions of estimates within so much. *Ready s* is the CPU time to make
the cost model of a network, in a separate process that had made one of a tiny network; *cost estimates a second* are of
5,000 random submodels estimated at once, also by CPU time. Estimates guide a search and exact plans decide, so an
estimate may err on either side. Bounds for each row: half within 6 %, 95 % within 12 %, all within 25 %.
"""


def write_results(rows: Sequence[Row]) -> None:
    """Write the page of results."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "executorch", "torch"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    lines = [
        "# Cost estimates of submodels against exact plans",
        "",
        "`python benchmarks/plan_estimate.py --networks T --architectures N --plans plans.jsonl --write` for each",
        f"table T and the numbers in it, {versions}, {machine}, one thread.",
        ABOUT,
    ]
    for networks in TABLES:
        table_rows = [format_row(row) for row in rows if row.networks == networks]
        if table_rows:
            lines += [f"## {networks.capitalize()} networks", "", *HEAD, *table_rows, ""]
    write_page(RESULTS, "\n".join(lines))


def summarise(rows: Sequence[Row]) -> dict[str, object]:
    """All rows, with the fractions over all cost estimates."""
    architectures = sum(row.architectures for row in rows)
    return {
        "rows": [asdict(row) for row in rows],
        "within_6": sum(row.within_6 * row.architectures for row in rows) / architectures,
        "within_12": sum(row.within_12 * row.architectures for row in rows) / architectures,
        "within_25": sum(row.within_25 * row.architectures for row in rows) / architectures,
        "ready_s_worst": max(row.ready_s for row in rows),
        "estimates_per_s_least": min(row.estimates_per_s for row in rows),
    }


def parse_cases() -> tuple[argparse.Namespace, list[Case]]:
    """Parse the arguments and the cases that they name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", choices=sorted(TABLES), default="small", help="which table of networks")
    parser.add_argument(
        "--architectures", type=int, default=20, help="submodels of each family; 0 only judges the plans in the file"
    )
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only this one; may be repeated")
    parser.add_argument("--target", action="append", choices=TARGETS, help="onnx and executorch; may be repeated")
    parser.add_argument("--plans", type=Path, help="a file of exact plans; new ones are added")
    parser.add_argument(
        "--spoil", type=float, default=1.0, metavar="FACTOR", help="multiply every second cost estimate by this factor"
    )
    parser.add_argument("--write", action="store_true", help=f"judge all plans of the file, and write {RESULTS.name}")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parse_arguments(parser, architectures=1, family=["mlp"], target=["onnx"])
    if options.write and options.spoil != 1:
        parser.error("--write takes cost estimates as they are; leave out --spoil")
    table, families = TABLES[options.networks], options.family or sorted(TABLES[options.networks])
    cases = [
        (options.networks, family, target)
        for family in families
        for target in dict.fromkeys(options.target or TARGETS[:2])
        if family in table
    ]
    return options, cases


def main() -> None:
    """Make missing plans, judge, print, and write on request."""
    options, cases = parse_cases()
    plans = read_plans(options.plans)
    torch.set_num_threads(1)
    make_plans(cases, options.architectures, options.plans, plans)
    count = options.architectures or math.inf
    judged = [plan for plan in plans.values() if options.write or (plan.case in cases and plan.number < count)]
    rows = []
    print("\n".join(HEAD), flush=True)
    for row in judge(group_plans(judged), options.spoil):
        print(format_row(row), flush=True)
        rows.append(row)
    if not rows:
        sys.exit("there are no plans to judge cost estimates by; take --architectures of 1 or more, or another file")
    if options.write:
        write_results(rows)
    failed = [f"{row.family} on {row.target} ({row.networks})" for row in rows if not row.within_bounds]
    if failed:
        print(f"not within the bounds: {', '.join(failed)}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(summarise(rows)), flush=True)
    sys.exit(1 if failed and not options.smoke else 0)


if __name__ == "__main__":
    main()
