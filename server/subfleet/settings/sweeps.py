"""Expands the `[[sweep]]` tables of a file into runs, one for each combination of entries, values and seeds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Annotated, Any

from subfleet.protocol.bounds import Length, checked
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import validate
from subfleet.settings.overrides import apply_override, flatten_settings

_MAX_RUNS = 10_000
_MAX_LABEL = 24
_Choice = tuple[str, Iterable[tuple[str, Any]]]
"""An alternative of an axis: its label in names of runs, and the values of dotted keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class _Entry:
    """A table `[[sweep.entries]]`: `set` adds settings to the file; entries of one axis are alternatives."""

    name: Annotated[str, Length(least=1)]
    axis: str = ""
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class _Sweep:
    """A table `[[sweep]]`: `values` has a list of alternatives for each dotted key."""

    seeds: tuple[int, ...] = ()
    values: dict[str, Annotated[tuple[Any, ...], Length(least=1)]] = field(default_factory=dict)
    entries: tuple[_Entry, ...] = ()


def expand_sweeps(plain: Mapping[str, Any], seeds: Sequence[int] = ()) -> list[dict[str, Any]]:
    """The plain runs of a plain file, each with its own name.

    Every entry is combined with every entry of other axes, every value and every seed of its table. A file without
    `[[sweep]]` is one run. If `model_of.run` names an entry, it is replaced by the run that differs only in having that
    entry, and that run comes first.

    Args:
        plain: the file.
        seeds: replace the seeds of the file.

    Raises:
        ConfigError: a sweep is invalid, runs wait for each other's models, or there are too many runs.
    """
    base = {key: value for key, value in plain.items() if key != "sweep"}
    tables = plain.get("sweep", [{}])
    if not isinstance(tables, list):
        raise ConfigError("sweep must be tables [[sweep]]")
    runs = [run for table in tables for run in _expand(base, validate(_Sweep, table, "a table [[sweep]]"), seeds)]
    if len(runs) > _MAX_RUNS:
        raise ConfigError(f"the sweeps have {len(runs)} runs, but may have at most {_MAX_RUNS}")
    names = [run.get("name") for run in runs]
    if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ConfigError(f"the sweeps have equal runs, such as {repeated[0]!r}; give them different values")
    return _sort(runs)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds such as "1..5" or "1,2,7".

    Raises:
        ConfigError: the text has neither form.
    """
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or (dots and int(last) < int(first)):
        raise ConfigError(f"--seeds is {text!r:.80}, but must be like 1..5 or 1,2,7")
    numbers = [int(part) for part in parts]
    return tuple(range(numbers[0], numbers[1] + 1)) if dots else tuple(numbers)


def _expand(base: Mapping[str, Any], sweep: _Sweep, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    axes: dict[str, list[_Choice]] = {}
    for entry in sweep.entries:
        axes.setdefault(entry.axis, []).append((_clean(entry.name), tuple(flatten_settings(entry.set))))
    values: list[list[_Choice]] = [
        [(_label(value, index), ((key, value),)) for index, value in enumerate(alternatives)]
        for key, alternatives in sweep.values.items()
    ]
    chosen: Sequence[int | None] = seeds or sweep.seeds or (None,)
    for choices in product(*axes.values(), *values):
        run, labels = dict(base), [label for label, _ in choices]
        for key, value in (pair for _, pairs in choices for pair in pairs):
            run = apply_override(run, key.split("."), value)
        source = _model_run(run)
        position = next((index for index, axis in enumerate(axes.values()) if source in dict(axis)), None)
        for seed in chosen:
            own: dict[str, Any] = {"name": _name(run, labels, seed)} | ({} if seed is None else {"seed": seed})
            if position is not None:
                replaced = [*labels[:position], str(source), *labels[position + 1 :]]
                own["model_of"] = {**run["model_of"], "run": _name(run, replaced, seed)}
            yield run | own


def _name(run: Mapping[str, Any], labels: Sequence[str], seed: int | None) -> str:
    return "-".join([str(run.get("name", "")), *labels, *([] if seed is None else [f"s{seed}"])])


def _model_run(run: Mapping[str, Any]) -> str | None:
    """The run from which a run takes its model, if it does."""
    table = run.get("model_of")
    name = table.get("run") if isinstance(table, dict) else None
    return name if isinstance(name, str) else None


def _sort(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs in order, but runs that take models from others after these."""
    names = {run["name"] for run in runs}
    sources = {run["name"]: names & {_model_run(run)} for run in runs}
    try:
        order = [*TopologicalSorter(sources).static_order()]
    except CycleError as error:
        name = error.args[1][0]
        raise ConfigError(
            f"the run {name!r} of a sweep needs its own model to start; name another run in its model_of"
        ) from error
    depths = dict[str, int]()
    for name in order:
        depths[name] = 1 + max((depths[source] for source in sources[name]), default=0)
    return sorted(runs, key=lambda run: depths[run["name"]])


def _label(value: Any, index: int) -> str:
    """The label of a value in names of runs."""
    if isinstance(value, dict):
        value = value.get("type") or value.get("family") or value.get("preset") or f"v{index}"
    text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
    return _clean(text.replace("-", "_"))[:_MAX_LABEL]


def _clean(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_.-" else "_" for letter in text)
