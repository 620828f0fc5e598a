"""Several runs out of one file: every named entry and every value of some keys, with every seed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from subfleet.protocol.errors import ConfigError
from subfleet.settings.overrides import spread_out, with_override

__all__ = ["seeds_of", "swept"]

_SEEDS, _VALUES, _ENTRIES = "seeds", "values", "entries"
_MODEL_OF = "model_of"
_ENTRY_KEYS = frozenset(("name", "axis", "set"))
_MOST_RUNS = 10_000
_LONGEST_LABEL = 24


def swept(plain: Mapping[str, Any], seeds: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """The plain runs of a plain file, each with a name of its own.

    A table `[[sweep]]` has `entries`, `values` and `seeds`. An entry has a name and `set`, what it says in place of the
    file; those of one `axis` are alternatives. `values` is a table of dotted keys with a list of values each. Every
    entry is combined with every one of the other axes, every value and every seed of its table. Without such a table
    the file is one run.

    Where `model_of.run` names an entry, it becomes the run that is alike but for that entry, and comes before.

    Args:
        plain: the file.
        seeds: in place of those of the file.

    Raises:
        ConfigError: a sweep is not of this form, runs wait for each other's models, or there are too many.
    """
    base = {key: value for key, value in plain.items() if key != "sweep"}
    tables = plain.get("sweep", [{}])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("sweep must be tables [[sweep]]")
    runs = [one for table in tables for one in _of_table(base, table, seeds)]
    if len(runs) > _MOST_RUNS:
        raise ConfigError(f"the sweeps have {len(runs)} runs, but may have {_MOST_RUNS} at most")
    names = [run.get("name") for run in runs]
    if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ConfigError(f"runs of the sweeps are alike, such as {repeated[0]!r}; let their values differ")
    yield from _in_order(runs)


def seeds_of(text: str) -> tuple[int, ...]:
    """Seeds such as "1..5" or "1,2,7".

    Raises:
        ConfigError: it is nothing of the kind.
    """
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or (dots and int(last) < int(first)):
        raise ConfigError(f"--seeds is {text!r:.80}, but must be like 1..5 or 1,2,7")
    numbers = [int(part) for part in parts]
    return tuple(range(numbers[0], numbers[1] + 1)) if dots else tuple(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """One of the alternatives of an axis: what its runs are named, and the values of dotted keys."""

    label: str
    values: Sequence[tuple[str, Any]]


def _of_table(base: Mapping[str, Any], table: Mapping[str, Any], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    values = table.get(_VALUES, {})
    unknown = sorted(table.keys() - {_SEEDS, _VALUES, _ENTRIES})
    if unknown or not isinstance(values, dict) or not all(isinstance(one, list) and one for one in values.values()):
        told = f"has the key {unknown[0]!r}" if unknown else "has values that are no lists"
        raise ConfigError(
            f"a table [[sweep]] {told}, but has seeds = [1, 2], [[sweep.entries]] with name and set, and "
            "[sweep.values] with key = [one, other]"
        )
    wanted = list(seeds) or table.get(_SEEDS, [])
    if not isinstance(wanted, list) or not all(isinstance(seed, int) for seed in wanted):
        raise ConfigError(f"sweep.seeds is {wanted!r:.80}, but must be a list of whole numbers")
    keys = [
        [_Choice(label=_label(value, place), values=[(key, value)]) for value in found]
        for place, (key, found) in enumerate(values.items())
    ]
    axes = _axes(table.get(_ENTRIES, []))
    for chosen in product(*axes, *keys):
        run = _set(base, chosen)
        for seed in wanted or [None]:
            own: dict[str, Any] = {"name": _name(run, chosen, seed)} | ({} if seed is None else {"seed": seed})
            yield run | own | _taking(run, axes, chosen, seed)


def _set(base: Mapping[str, Any], chosen: Sequence[_Choice]) -> dict[str, Any]:
    run = dict(base)
    for key, value in (pair for choice in chosen for pair in choice.values):
        run = with_override(run, key.split("."), value)
    return run


def _name(run: Mapping[str, Any], chosen: Sequence[_Choice], seed: int | None) -> str:
    names = [*(choice.label for choice in chosen), *([] if seed is None else [f"s{seed}"])]
    return "-".join([str(run.get("name", "")), *names])


def _taking(
    run: Mapping[str, Any], axes: Sequence[Sequence[_Choice]], chosen: Sequence[_Choice], seed: int | None
) -> dict[str, Any]:
    """Of which run a run takes its model, where it names an entry: of the one that is like itself but for that."""
    if not _waits(run):
        return {}
    said = run[_MODEL_OF]
    for place, axis in enumerate(axes):
        for choice in axis:
            if choice.label == said["run"]:
                others = [choice if at == place else one for at, one in enumerate(chosen)]
                return {_MODEL_OF: {**said, "run": _name(run, others, seed)}}
    return {}


def _in_order(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs in their order, but those that take the model of one of them behind that."""
    names = {run["name"] for run in runs}
    waits = {run["name"]: run[_MODEL_OF]["run"] for run in runs if _waits(run) and run[_MODEL_OF]["run"] in names}
    depths = dict.fromkeys(names, 0)
    for name in waits:
        behind = [name]
        while (other := waits.get(behind[-1])) is not None:
            if other in behind:
                raise ConfigError(f"the run {name!r} of a sweep waits for a model of its own; take that of another run")
            behind.append(other)
        depths[name] = len(behind)
    return sorted(runs, key=lambda run: depths[run["name"]])


def _waits(run: Mapping[str, Any]) -> bool:
    said = run.get(_MODEL_OF)
    return isinstance(said, dict) and isinstance(said.get("run"), str)


def _axes(entries: Any) -> list[list[_Choice]]:
    """The entries of each axis, in the order in which the axes are named first."""
    if not isinstance(entries, list):
        raise ConfigError(f"sweep.entries is {entries!r:.80}, but must be tables [[sweep.entries]]")
    axes: dict[str, list[_Choice]] = {}
    for place, entry in enumerate(entries):
        where = f"sweep.entries[{place}]"
        if not isinstance(entry, dict) or not entry.keys() <= _ENTRY_KEYS:
            raise ConfigError(f"{where} is {entry!r:.80}, but must be a table with name, set and, if need be, axis")
        name, axis, said = entry.get("name"), entry.get("axis", ""), entry.get("set", {})
        if not isinstance(name, str) or not name or not isinstance(axis, str):
            raise ConfigError(
                f"{where} has name {name!r:.80} and axis {axis!r:.80}, but both must be texts, name not empty"
            )
        if not isinstance(said, dict):
            raise ConfigError(f"{where}.set is {said!r:.80}, but must be a table of keys and values")
        axes.setdefault(axis, []).append(_Choice(label=_plain_label(name), values=list(spread_out(said))))
    return list(axes.values())


def _label(value: Any, place: int) -> str:
    """What stands for a value in a run's name."""
    if isinstance(value, dict):
        value = value.get("type") or value.get("family") or value.get("preset") or f"v{place}"
    text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
    return _plain_label(text.replace("-", "_"))[:_LONGEST_LABEL]


def _plain_label(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_.-" else "_" for letter in text)
