"""Compares runs: each configuration over its seeds, and its gain over another one, paired by seed."""

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.task_kinds import METRICS, better
from subfleet.reporting.spending import AXES, Axis, Spent, find_first, sum_spent
from subfleet.settings.fingerprint import list_changes, select_outcome_settings
from subfleet.settings.run_folder import interpret_summary, read_description, read_summary

_SEED = re.compile(r"-s\d+$")
FIGURES: Mapping[str, str] = MappingProxyType(
    {
        **{name: metric.title for name, metric in METRICS.items() if name != "loss"},
        "submodels": "submodels",
        "worst_tier": "worst tier",
        "own_mean": "own",
        "own_range": "own range",
        "own_worst": "own worst",
        "backdoor": "backdoor",
    }
)
"""Column titles of further metrics and of the accuracies of clients' submodels."""
COSTS: Mapping[str, tuple[str, float, str]] = MappingProxyType(
    {
        "networks": ("networks", 1, ".1f"),
        "training_macs": ("training GMACs", 1e9, ".3g"),
        "bytes_down": ("MB down", 1e6, ".1f"),
        "bytes_up": ("MB up", 1e6, ".1f"),
        "storage_bytes": ("storage MB", 1e6, ".2f"),
        "round_s": ("round s", 1, ".2f"),
        "round_deviation_s": ("round ± s", 1, ".2f"),
        "expected_round_s": ("expected s", 1, ".2f"),
        "expected_round_deviation_s": ("expected ± s", 1, ".2f"),
    }
)
"""Column title, unit and format of each cost of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The mean difference of a figure between two methods, with its 95 % interval.

    Attributes:
        low: lower end of the interval.
        high: upper end of the interval.
        pairs: number of seeds.
    """

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def tie(self) -> bool:
        """Whether the interval contains 0, so that neither method is better as far as these seeds show."""
        return self.low <= 0 <= self.high

    @property
    def interval(self) -> str:
        """The interval in words."""
        return f"{self.low:+.3f} to {self.high:+.3f}{', tie' if self.tie else ''}"


def measure_difference(ours: Sequence[float], theirs: Sequence[float]) -> PairedDifference:
    """Compare two methods over the same seeds by Student's t on the differences of the pairs.

    Args:
        ours: a figure for each seed.
        theirs: the figures of the other method, in the same order.

    Raises:
        ValueError: there are fewer than 2 pairs, or the numbers of figures differ.
    """
    from scipy.special import stdtrit

    count = len(ours)
    if count != len(theirs) or count < 2:
        raise ValueError(f"there are {count} and {len(theirs)} figures, but both need the same number, at least 2")
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(differences)
    reach = float(stdtrit(count - 1, 0.975)) * statistics.stdev(differences) / math.sqrt(count)
    return PairedDifference(mean=mean, low=mean - reach, high=mean + reach, pairs=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """Runs that differ only in their seeds.

    Attributes:
        name: of the runs, without the seed.
        runs: the summary of each run, `summary.json`, by seed in ascending order.
    """

    name: str
    runs: Mapping[int, Mapping[str, Any]]

    @property
    def headline(self) -> str:
        """The metric by which the models are judged."""
        return str(next(iter(self.runs.values()))["headline"])

    @property
    def model(self) -> str:
        """The model that was evaluated, such as "full" or "each client"; if runs differ, each model once."""
        models = ((run["model"] or {}).get("short", "") for run in self.runs.values())
        return " or ".join(dict.fromkeys(models))

    @property
    def title(self) -> str:
        """The name and the model that was evaluated."""
        return f"{self.name} ({self.model})" if self.model else self.name

    @property
    def values(self) -> Mapping[int, float]:
        """The headline metric of each run, by seed."""
        return {seed: float(run["metrics"][self.headline]) for seed, run in self.runs.items()}

    @property
    def spent(self) -> Mapping[int, Sequence[Spent]]:
        """What each run had spent at the end of each round, by seed."""
        return {seed: list(sum_spent(run["rounds"], self.headline)) for seed, run in self.runs.items()}

    def trace(self, axis: Axis = "rounds") -> list[tuple[float, list[float]]]:
        """The headline metric over what was spent, for the rounds that every run has.

        Returns:
            For each round the mean of what the runs had spent, and the metric of each.

        Raises:
            ConfigError: it is unknown what they had spent.
        """
        points = []
        for ends in zip(*self.spent.values(), strict=False):
            spent = [getattr(end, axis) for end in ends]
            if None in spent:
                raise ConfigError(
                    f"rounds of {self.name!r} have no {axis}, because nobody measured them; plot --over another axis"
                )
            points.append((statistics.fmean(spent), [float(end.value) for end in ends if end.value is not None]))
        return [point for point in points if point[1]]

    def reach(self, target: float) -> dict[str, float]:
        """What it took on average to reach a target of the headline metric, and in how many runs it was reached."""
        found = [find_first(spent, target, self.headline) for spent in self.spent.values()]
        reached = [first for first in found if first is not None]
        columns = {str(axis): [getattr(first, axis) for first in reached] for axis in AXES}
        means = {axis: statistics.fmean(column) for axis, column in columns.items() if column and None not in column}
        return {"target": target, "runs": len(reached), **means}


def read_entrants(folders: Iterable[Path]) -> tuple[Entrant, ...]:
    """Read the folders of runs, and group the runs by name in the given order.

    Raises:
        FileError: a folder is not that of a finished run.
        ConfigError: runs of one name differ in more than their seeds, or have the same seed.
    """
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    first: dict[str, dict[str, Any]] = {}
    for folder in folders:
        run = read_description(folder)
        name = _SEED.sub("", run.name)
        settings = {key: value for key, value in select_outcome_settings(run).items() if key not in ("name", "seed")}
        if changes := list_changes(first.setdefault(name, settings), settings):
            raise ConfigError(f"runs named {name!r} differ in {changes}; give one of them another name")
        runs = by_name.setdefault(name, {})
        if run.seed in runs:
            raise ConfigError(f"two runs named {name!r} have seed {run.seed}; leave one of them out")
        runs[run.seed] = _read_summary(folder)
    return tuple(Entrant(name=name, runs=dict(sorted(runs.items()))) for name, runs in by_name.items())


def _read_summary(folder: Path) -> Mapping[str, Any]:
    """The summary of a run, after making sure that everything that a comparison reads is there."""
    summary = read_summary(folder)
    if summary is None:
        raise FileError(f"the run {folder} is not finished; let it finish first")
    with interpret_summary(folder):
        if summary["metrics"].get(summary["headline"]) is None:
            raise ConfigError(
                f"the run {folder} has no metrics, because no round was aggregated or nothing was trained; leave it out"
            )
        alone = Entrant(name=folder.name, runs={0: summary})
        _ = compare_entrants([alone]), alone.trace()
    return summary


def compare_entrants(entrants: Sequence[Entrant], target: float | None = None) -> list[dict[str, Any]]:
    """Compare each entrant with the first.

    Args:
        entrants: of one kind of task.
        target: a value of the headline metric, for what it takes to reach it.

    Returns:
        Plain data for each entrant. Means are over the seeds.

        name, model: of the entrant; seeds: of its runs.
        headline metric, by its name: the mean. worst: of the worst seed.
        participation: the mean. megabytes: moved in all rounds.
        figures: means by the names in `FIGURES`, without those that a run lacks.
        costs: means by the names in `COSTS`, without those that a run lacks.
        reached: the target, the number of runs that reached it, and the means of what they had spent by then, by the
        names in `AXES`; None without a target.
        outliers: in how many runs updates were scaled down, left out, or reported; empty if there were none.
        gain: improvement of the headline metric over the first entrant, over the seeds that both have, above 0 if it
        is better, as a `PairedDifference`; None for the first entrant, or with fewer than two common seeds.

    Raises:
        ConfigError: there are no entrants, or they report different metrics.
    """
    if not entrants:
        raise ConfigError("there are no runs to compare; name their folders")
    first, headline = entrants[0], entrants[0].headline
    if other := next((entrant for entrant in entrants if entrant.headline != headline), None):
        raise ConfigError(
            f"runs {first.name!r} report {headline} and runs {other.name!r} report {other.headline}, so they cannot be "
            "compared; name runs of the same kind of task"
        )
    return [_compare(entrant, first, target) for entrant in entrants]


def _compare(entrant: Entrant, first: Entrant, target: float | None) -> dict[str, Any]:
    runs, values = list(entrant.runs.values()), entrant.values
    sign = better(entrant.headline)
    seeds = sorted(entrant.runs.keys() & first.runs.keys()) if entrant is not first else []
    ours, theirs = ([sign * side.values[seed] for seed in seeds] for side in (entrant, first))
    rows = [row for run in runs for record in run["rounds"] for row in record["clients"]]
    outliers = {
        kind: sum(bool(run["outliers"].get(kind)) for run in runs) for kind in ("scaled", "left_out", "reported")
    }
    return {
        "name": entrant.name,
        "model": entrant.model,
        "seeds": list(entrant.runs),
        entrant.headline: statistics.fmean(values.values()),
        "worst": min(values.values(), key=lambda value: sign * value),
        "participation": statistics.fmean(float(run["participation"]) for run in runs),
        "megabytes": sum(row["bytes_down"] + row["bytes_up"] for row in rows) / len(runs) / 1e6,
        "figures": _average(
            (name for name in FIGURES if name != entrant.headline), [_select_figures(run) for run in runs]
        ),
        "costs": _average(COSTS, [_select_costs(run) for run in runs]),
        "reached": None if target is None else entrant.reach(target),
        "outliers": ", ".join(
            f"{kind.replace('_', ' ')} in {count} of {len(runs)}" for kind, count in outliers.items() if count
        ),
        "gain": asdict(measure_difference(ours, theirs)) if len(seeds) > 1 else None,
    }


def _average(names: Iterable[str], runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each figure that all runs have."""
    columns: dict[str, list[Any]] = {name: [run.get(name) for run in runs] for name in names}
    return {name: statistics.fmean(map(float, column)) for name, column in columns.items() if None not in column}


def _select_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """All metrics, figures of clients' submodels, and what devices measured on held-out samples of their own."""
    spread = (summary["evaluation"] or {}).get(summary["headline"])
    names = (("own_mean", "mean"), ("own_range", "interquartile_range"), ("own_worst", "worst"))
    own = {name: spread[key] for name, key in names} if spread else {}
    return {**summary["metrics"], **own, **summary["figures"]}


def _select_costs(summary: Mapping[str, Any]) -> dict[str, float]:
    """Costs of all rounds; times only if they are known."""
    costs = summary["costs"]
    times = {"round": costs["rounds"], "expected_round": costs["expected_rounds"]}
    return {
        "networks": len([network for network in summary["networks"] if network["retired_round"] != 0]),
        **{name: costs[name] for name in COSTS if name in costs},
        **{f"{name}_s": timing["mean_s"] for name, timing in times.items() if timing is not None},
        **{f"{name}_deviation_s": timing["deviation_s"] for name, timing in times.items() if timing is not None},
    }


def build_rows(comparisons: Sequence[Mapping[str, Any]], headline: str) -> list[dict[str, str]]:
    """A row of cells by column title for each entrant; columns that are empty in all rows are left out.

    Args:
        comparisons: of entrants that are judged by the same metric.
        headline: name of this metric.
    """
    rows = [_build_row(comparison, headline) for comparison in comparisons]
    optional = {*FIGURES.values(), *(title for title, *_ in COSTS.values()), "outliers"} - {METRICS[headline].title}
    cells = {title: {row[title] for row in rows} for title in rows[0].keys() & optional}
    empty = {title for title in cells if cells[title] <= ({"", "1.0"} if title == "networks" else {""})}
    return [{title: cell for title, cell in row.items() if title not in empty} for row in rows]


def _build_row(comparison: Mapping[str, Any], headline: str) -> dict[str, str]:
    figures, costs, gain = comparison["figures"], comparison["costs"], comparison["gain"]
    difference = None if gain is None else PairedDifference(**gain)
    return {
        "name": comparison["name"],
        "seeds": str(len(comparison["seeds"])),
        "model": comparison["model"],
        METRICS[headline].title: f"{comparison[headline]:.4f}",
        "worst": f"{comparison['worst']:.4f}",
        **{
            title: f"{figures[name]:.4f}" if name in figures else ""
            for name, title in FIGURES.items()
            if name != headline
        },
        "took part": f"{comparison['participation']:.2f}",
        "MB moved": f"{comparison['megabytes']:.1f}",
        "gain": "" if difference is None else f"{difference.mean:+.4f}",
        "95 % interval": "" if difference is None else difference.interval,
        **{
            title: format(costs[name] / unit, form) if name in costs else ""
            for name, (title, unit, form) in COSTS.items()
        },
        **_build_reached_cells(comparison),
        "outliers": comparison["outliers"],
    }


def list_reached_titles(target: float | None) -> list[str]:
    """The titles of the columns that say what it took to reach a target."""
    return [] if target is None else [f"{title} to {target:g}" for title, _, _ in AXES.values()]


def _build_reached_cells(comparison: Mapping[str, Any]) -> dict[str, str]:
    reached = comparison["reached"]
    if reached is None:
        return {}
    runs, count = reached["runs"], len(comparison["seeds"])
    some = f" ({runs} of {count} seeds)" if runs < count else ""
    cells = [
        f"{reached[axis] / unit:{form}}{some}" if axis in reached else "-" if runs else "never"
        for axis, (_, unit, form) in AXES.items()
    ]
    return dict(zip(list_reached_titles(reached["target"]), cells, strict=True))


def format_csv(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def format_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows as a table in Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
