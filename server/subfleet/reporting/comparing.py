"""Runs side by side: what each setting comes to over its seeds, and what it gains on another one, seed by seed."""

import csv
import io
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.task_kinds import METRICS, better
from subfleet.reporting.paired import PairedDifference, paired_difference
from subfleet.settings.kept import kept_run
from subfleet.settings.parts import parts_of
from subfleet.settings.resuming import changed_settings
from subfleet.settings.summary import read_summary, understood_summary

__all__ = [
    "COSTS",
    "FIGURES",
    "OUTLIERS",
    "Comparison",
    "Entrant",
    "as_csv",
    "as_markdown",
    "as_plain",
    "as_rows",
    "compared",
    "read_folders",
]

_SEED = re.compile(r"-s\d+$")
_LEAST_PAIRS = 2
FIGURES: Mapping[str, str] = MappingProxyType(
    {
        **{name: one.title for name, one in METRICS.items() if name != "loss"},
        "submodels": "submodels",
        "worst_tier": "worst tier",
        "own_mean": "own",
        "own_range": "own range",
        "own_worst": "own worst",
        "backdoor": "backdoor",
    }
)
"""What a run tells beside its headline: further metrics, and its clients' own submodels; and its name in tables."""
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
"""What a run tells of all its training: what a table calls it, in which unit, and in which form."""


OUTLIERS: Mapping[str, str] = MappingProxyType({"scaled": "scaled", "left_out": "left out", "reported": "reported"})
"""What a run may do with updates that are unlike the others, and how a table says that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """The runs that differ in nothing but their seeds.

    Attributes:
        name: of the runs, without the seed.
        runs: what each came to, by its seed: `summary.json` as it stands.
    """

    name: str
    runs: Mapping[int, Mapping[str, Any]]

    @property
    def headline(self) -> str:
        """The metric that its models are judged by."""
        return _headline(next(iter(self.runs.values())))

    def figures(self, key: str) -> list[float]:
        """A figure of each run, in the order of the seeds."""
        return [float(self.runs[seed][key]) for seed in sorted(self.runs)]

    @property
    def model(self) -> str:
        """Which model was evaluated, such as "full" or "each client"; where runs differ, each of them once."""
        told = [(self.runs[seed].get("model") or {}).get("short", "") for seed in sorted(self.runs)]
        return " or ".join(dict.fromkeys(told))

    @property
    def told(self) -> str:
        """Its name, with the model that was evaluated."""
        return f"{self.name} ({self.model})" if self.model else self.name

    @property
    def values(self) -> Mapping[int, float]:
        """Of each run by its seed, the metric that its model is judged by."""
        return {seed: _value(self.runs[seed]) for seed in sorted(self.runs)}

    @property
    def curve(self) -> Mapping[int, list[float]]:
        """The metric that models are judged by after each round that every run has, by the round."""
        by_round: dict[int, list[float]] = {}
        for seed in sorted(self.runs):
            for record in self.runs[seed]["rounds"]:
                by_round.setdefault(int(record["round"]), []).append(float(record[self.headline]))
        return {number: found for number, found in sorted(by_round.items()) if len(found) == len(self.runs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An entrant beside the first one.

    Attributes:
        figures: what a batch tells besides, means over the seeds, by the names of `reporting.run_figures`:
            accuracies of its clients' submodels, success of a backdoor; without what some run lacks.
        costs: of all training, means over the seeds, by the names in `COSTS`; without what some run lacks.
        mean: over the seeds, of the metric that models are judged by.
        worst: of the seeds: the smallest, or where a smaller metric is better the largest.
        outliers: in how many of its runs updates were scaled down or left out, or reported to be far from the others;
            empty where there were none.
        gain: by how much its metric is better than the first one's, over the seeds that both have, above 0 where it is
            better; None with fewer than two of them, and for the first one.
    """

    entrant: Entrant
    mean: float
    worst: float
    participation: float
    megabytes: float
    figures: Mapping[str, float]
    costs: Mapping[str, float]
    outliers: str
    gain: PairedDifference | None


def read_folders(folders: Iterable[Path]) -> tuple[Entrant, ...]:
    """The entrants of some runs' folders, in the order in which they are named.

    Raises:
        FileError: a folder is not that of a run that is over.
        ConfigError: runs of one name differ in more than their seeds, or have the same seed.
    """
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    first: dict[str, dict[str, Any]] = {}
    for folder in folders:
        run = kept_run(folder)
        name = _SEED.sub("", run.name)
        settings = {key: value for key, value in parts_of(run).items() if key not in ("name", "seed")}
        if changes := changed_settings(first.setdefault(name, settings), settings):
            raise ConfigError(f"runs named {name!r} differ in {changes}; give one of them another name")
        runs = found.setdefault(name, {})
        if run.seed in runs:
            raise ConfigError(f"two runs named {name!r} have seed {run.seed}; name one of them")
        runs[run.seed] = _summary(folder)
    return tuple(Entrant(name=name, runs=runs) for name, runs in found.items())


def _summary(folder: Path) -> Mapping[str, Any]:
    """What a run came to, where it can be compared at all: it is compared with nothing here."""
    found = read_summary(folder)
    if found is None:
        raise FileError(f"the run {folder} is not over; let it end first")
    with understood_summary(folder):
        if found.get("metrics", found).get(_headline(found)) is None:
            raise ConfigError(
                f"no round of the run {folder} was aggregated, so that nothing is known of its model; leave it out"
            )
        alone = Entrant(name=folder.name, runs={0: found})
        _ = as_plain(compared([alone])), alone.curve  # whatever is read of it can be read
    return found


def compared(entrants: Sequence[Entrant]) -> tuple[Comparison, ...]:
    """Each entrant beside the first.

    Raises:
        ConfigError: there is none.
    """
    if not entrants:
        raise ConfigError("there are no runs to compare; name the folders of some")
    headline = entrants[0].headline
    if odd := next((one for one in entrants if one.headline != headline), None):
        raise ConfigError(
            f"runs {entrants[0].name!r} are judged by {headline} and runs {odd.name!r} by {odd.headline}, so that they "
            "cannot be compared; name runs of one kind of task"
        )
    sign, further = better(headline), [name for name in FIGURES if name != headline]
    return tuple(
        Comparison(
            entrant=one,
            mean=statistics.fmean(one.values.values()),
            worst=min(one.values.values(), key=lambda value: sign * value),
            participation=statistics.fmean(one.figures("participation")),
            megabytes=statistics.fmean(map(_moved_bytes, one.runs.values())) / 1e6,
            figures=_means(further, [{**_own(run), **run.get("figures", {})} for run in one.runs.values()]),
            costs=_means(COSTS, [_costs(run) for run in one.runs.values()]),
            outliers=_outliers(one),
            gain=_gain(one, entrants[0]),
        )
        for one in entrants
    )


def _gain(one: Entrant, first: Entrant) -> PairedDifference | None:
    seeds = sorted(one.runs.keys() & first.runs.keys())
    if one is first or len(seeds) < _LEAST_PAIRS:
        return None
    sign = better(one.headline)
    ours, theirs = ([sign * entrant.values[seed] for seed in seeds] for entrant in (one, first))
    return paired_difference(ours, theirs)


def _outliers(one: Entrant) -> str:
    """What its runs did with updates that were unlike the others; runs of earlier releases do not tell."""
    told = [run.get("outliers", {}) for run in one.runs.values()]
    counts = {words: sum(bool(found.get(kind)) for found in told) for kind, words in OUTLIERS.items()}
    return ", ".join(f"{words} in {count} of {len(told)}" for words, count in counts.items() if count)


def _headline(summary: Mapping[str, Any]) -> str:
    """What a run is judged by; summaries of before metrics came know accuracy alone."""
    return str(summary.get("headline", "accuracy"))


def _value(summary: Mapping[str, Any]) -> float:
    return float(summary.get("metrics", summary)[_headline(summary)])


def _means(names: Iterable[str], told: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean over some runs of each figure that all of them tell."""
    known = [name for name in names if all(figures.get(name) is not None for figures in told)]
    return {name: statistics.fmean(float(figures[name]) for figures in told) for name in known}


def _own(summary: Mapping[str, Any]) -> dict[str, float]:
    """Further metrics, and what devices found on held-out samples of their own, on any host."""
    headline = _headline(summary)
    told = {name: value for name, value in summary.get("metrics", {}).items() if name != headline}
    found = (summary.get("evaluation") or {}).get(headline)
    if found is None:
        return told
    return {**told, "own_mean": found["mean"], "own_range": found["interquartile_range"], "own_worst": found["worst"]}


def _costs(summary: Mapping[str, Any]) -> dict[str, float]:
    """What all training took, of a run on any host; times as far as they are known."""
    told = summary.get("costs")
    if told is None:
        return {}
    times = {"round": told["rounds"], "expected_round": told["expected_rounds"]}
    return {
        "networks": len([one for one in summary["networks"] if one["retired_round"] != 0]),
        **{name: told[name] for name in COSTS if name in told},
        **{f"{name}_s": one["mean_s"] for name, one in times.items() if one is not None},
        **{f"{name}_deviation_s": one["deviation_s"] for name, one in times.items() if one is not None},
    }


def _moved_bytes(summary: Mapping[str, Any]) -> int:
    return sum(row["bytes_down"] + row["bytes_up"] for record in summary["rounds"] for row in record["clients"])


def _cells(one: Comparison, names: Sequence[str], costs: Sequence[str]) -> dict[str, str]:
    gain = one.gain
    return {
        "name": one.entrant.name,
        "seeds": str(len(one.entrant.runs)),
        "model": one.entrant.model,
        METRICS[one.entrant.headline].title: f"{one.mean:.4f}",
        "worst": f"{one.worst:.4f}",
        **{FIGURES[name]: f"{one.figures[name]:.4f}" if name in one.figures else "" for name in names},
        "took part": f"{one.participation:.2f}",
        "MB moved": f"{one.megabytes:.1f}",
        "gain": "" if gain is None else f"{gain.mean:+.4f}",
        "95 % interval": "" if gain is None else f"{gain.low:+.3f} to {gain.high:+.3f}{', tie' if gain.tie else ''}",
        **{COSTS[name][0]: _cost(name, one.costs) for name in costs},
        "outliers": one.outliers,
    }


def _cost(name: str, costs: Mapping[str, float]) -> str:
    _, unit, form = COSTS[name]
    return format(costs[name] / unit, form) if name in costs else ""


def as_rows(found: Sequence[Comparison]) -> list[dict[str, str]]:
    """Cells by their heads, one row for each entrant; what none has has no column."""
    names = [name for name in FIGURES if any(name in one.figures for one in found)]
    costs = [name for name in COSTS if any(name in one.costs for one in found)]
    if all(one.costs.get("networks", 1) == 1 for one in found):
        costs = [name for name in costs if name != "networks"]
    rows = [_cells(one, names, costs) for one in found]
    if not any(one.outliers for one in found):
        for row in rows:
            del row["outliers"]
    return rows


def as_csv(found: Sequence[Comparison]) -> str:
    """The table as a file for spreadsheets."""
    rows = as_rows(found)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(found: Sequence[Comparison]) -> str:
    """The table as Markdown."""
    rows = as_rows(found)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_plain(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The figures themselves, for JSON."""
    return [
        {
            "name": one.entrant.name,
            "model": one.entrant.model,
            "seeds": sorted(one.entrant.runs),
            one.entrant.headline: one.mean,
            "worst": one.worst,
            "participation": one.participation,
            "megabytes": one.megabytes,
            "figures": dict(one.figures),
            "costs": dict(one.costs),
            "outliers": one.outliers,
            "gain": None
            if one.gain is None
            else {"mean": one.gain.mean, "low": one.gain.low, "high": one.gain.high, "pairs": one.gain.pairs},
        }
        for one in found
    ]
