"""Numbers that no training can use are refused when a run is read or made, in any of its settings."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from server.server_rig import config

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import to_plain, validate
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.overrides import apply_override
from subfleet.settings.reading import read_run, read_runs
from subfleet.settings.run import Run

SHIPPED = ("quickstart", "fedtrans-game", "oort", "fluid", "fedyogi")
"""Runs with many kinds of methods, codecs, clocks, populations and partitions."""


def numbers(plain: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of the numbers in plain settings; the first item of a list stands for all."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield from numbers(value, (*keys, key))
    elif isinstance(plain, list) and plain:
        yield from numbers(plain[0], (*keys, "0"))
    elif isinstance(plain, (int, float)) and not isinstance(plain, bool):
        yield keys


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_no_number_of_a_run_may_be_infinite_or_none_at_all(name: str) -> None:
    plain = to_plain(read_runs(name)[0])
    paths = list(numbers(plain))
    assert len(paths) > 60
    for keys in paths:
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(ConfigError, match=f"is {value}, but must be"):
                validate(Run, apply_override(plain, keys, value), ".".join(keys))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-0.1", "1e39", "1e400"])
@pytest.mark.parametrize("key", ["learning_rate", "optimiser.weight_decay", "optimiser.max_gradient_norm"])
def test_a_setting_that_no_program_can_compute_with_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key.rpartition('.')[2]} is .*, but must be"):
        read_run("quickstart", [f"training.{key}={value}"])


@pytest.mark.parametrize("value", ["-0.1", "1.0", "nan"])
def test_a_momentum_out_of_its_range_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"momentum is .*, but must be"):
        read_run("quickstart", [f"training.optimiser.momentum={value}"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_settings_made_in_python_are_checked_alike(value: float) -> None:
    for changes in ({"communication_s": value}, {"rates": (0.5, value)}):
        with pytest.raises(ValueError, match=r"(communication_s|rates\[1\]) is (nan|inf), but must be a finite number"):
            config(**changes)
    with pytest.raises(ValueError, match="learning_rate is"):
        TrainingSettings(learning_rate=value)
    with pytest.raises(ValueError, match="attempts_s is"):
        dataclasses.replace(config().deadlines, attempts_s=value)
