"""Several runs out of one file: every value of some keys, with every seed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from subfleet.protocol.errors import ConfigError
from subfleet.settings.overrides import with_override

__all__ = ["seeds_of", "swept"]

_SEEDS, _VALUES = "seeds", "values"
_MOST_RUNS = 10_000
_LONGEST_LABEL = 24


def swept(plain: Mapping[str, Any], seeds: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """The plain runs of a plain file, each with a name of its own.

    A table `[[sweep]]` has `values`, a table of dotted keys with a list of values each, and `seeds`. Every value is
    combined with every other one of its table, and with every seed. Without such a table the file is one run.

    Args:
        plain: the file.
        seeds: in place of those of the file.

    Raises:
        ConfigError: a sweep is not of this form, or there are too many runs.
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
    yield from runs


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


def _of_table(base: Mapping[str, Any], table: Mapping[str, Any], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    unknown = sorted(table.keys() - {_SEEDS, _VALUES})
    values = table.get(_VALUES, {})
    if unknown or not isinstance(values, dict) or not all(isinstance(one, list) and one for one in values.values()):
        told = f"has the key {unknown[0]!r}" if unknown else "has values that are no lists"
        raise ConfigError(
            f"a table [[sweep]] {told}, but has seeds = [1, 2] and [sweep.values] with key = [one, other]"
        )
    wanted = list(seeds) or table.get(_SEEDS, [])
    if not isinstance(wanted, list) or not all(isinstance(seed, int) for seed in wanted):
        raise ConfigError(f"sweep.seeds is {wanted!r:.80}, but must be a list of whole numbers")
    for chosen in product(*values.values()):
        run = dict(base)
        for key, value in zip(values, chosen, strict=True):
            run = with_override(run, key.split("."), value)
        labels = [_label(value, place) for place, value in enumerate(chosen)]
        for seed in wanted or [None]:
            names = [*labels, *([] if seed is None else [f"s{seed}"])]
            told = "-".join([str(run.get("name", "")), *names])
            yield run | {"name": told} | ({} if seed is None else {"seed": seed})


def _label(value: Any, place: int) -> str:
    """What stands for a value in a run's name."""
    if isinstance(value, dict):
        value = value.get("type") or value.get("family") or value.get("preset") or f"v{place}"
    text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
    return "".join(letter if letter.isalnum() or letter in "_." else "_" for letter in text)[:_LONGEST_LABEL]
