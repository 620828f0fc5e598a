"""Numbers claimed by devices are within a range: the decoder refuses others, or they are clipped."""

import math
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from subfleet.protocol.messages import Presence, Profile, Telemetry
from subfleet.protocol.plausible import PLAUSIBLE, plausible
from subfleet.protocol.readings import LogLow, Reading
from subfleet.rounds.signals import FromDevice

DECODED = frozenset(
    {
        "sample_count",
        "held_out_count",
        "label_count",
        "class_counts",
        "class_correct",
        "class_predicted",
        "loss",
        "square_loss",
        "memory_fraction",
        "battery_fraction",
        "operator_examples",
        "positives",
        "negatives",
        "absolute_errors",
        "squared_errors",
        "targets",
        "squared_targets",
        "size_bytes",
        "packing_width",
        "mean",
        "deviation",
        "minimum",
        "maximum",
    }
)
"""Fields whose range the decoder checks."""
COMPARED = frozenset({"round", "attempt", "indices", "size", "start", "modulus", "offset", "groups", "order"})
"""Fields compared with known values: an unknown value names nothing, or describes no submodel."""
SHAPES = frozenset({"input_shape", "other_input_shapes"})
"""Fields compared with the shapes of the run."""


def find_number_fields(kind: Any, name: str = "") -> Iterator[str]:
    """Names of the fields that hold numbers, including those of nested records."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        for field in fields(kind):
            yield from find_number_fields(hints[field.name], field.name)
    elif kind in (int, float):
        yield name
    elif get_origin(kind) in (Union, types.UnionType, tuple, dict):
        for part in get_args(kind):
            if part is not Ellipsis:
                yield from find_number_fields(part, name)
    elif get_origin(kind) is Literal and any(isinstance(value, int) for value in get_args(kind)):
        yield name


@pytest.mark.parametrize("kind", get_args(FromDevice))
def test_every_number_that_a_device_sends_has_a_range(kind: type) -> None:
    assert set(find_number_fields(kind)) <= PLAUSIBLE.keys() | DECODED | COMPARED | SHAPES


def test_a_message_within_all_ranges_stays_the_same_object() -> None:
    telemetry = make_telemetry(Reading(downlink_bps=1e6, memory_free_bytes=10))
    assert plausible(telemetry) is telemetry
    presence = Presence(client_id="ada", session_id="s", online=True)
    assert plausible(presence) is presence


def test_numbers_out_of_range_are_clipped() -> None:
    clipped = plausible(make_telemetry(Reading(downlink_bps=1e300, uplink_bps=5e-324, memory_free_bytes=2**62)))
    assert (clipped.reading.downlink_bps, clipped.reading.uplink_bps) == (1e13, 5e-324)
    assert (clipped.reading.memory_free_bytes, type(clipped.reading.memory_free_bytes)) == (2**50, int)
    assert clipped.log_low == LogLow(memory_budget_bytes=2**50)


@pytest.mark.parametrize(("claimed", "believed"), [(5e-324, 1e3), (1e9, 1e9), (1.7e308, 1e18)])
def test_a_pace_leaves_every_duration_a_number(claimed: float, believed: float) -> None:
    clipped = plausible(replace(PROFILE, macs_per_s=claimed))
    assert clipped.macs_per_s == believed
    assert math.isfinite(2**62 / believed)


PROFILE = Profile(
    client_id="ada",
    session_id="s",
    device="d",
    runtimes=("onnx",),
    sample_count=1,
    class_counts=(),
    input_shape=(1,),
    memory_total_bytes=1,
    memory_fraction=1.0,
)


def make_telemetry(reading: Reading) -> Telemetry:
    return Telemetry(
        client_id="ada",
        session_id="s",
        run_id="run",
        round=1,
        log_time_s=None,
        reading=reading,
        memory_budget_bytes=1,
        log_low=LogLow(memory_budget_bytes=2**62 if reading.downlink_bps == 1e300 else 1),
    )
