"""Descriptions of a run's networks and costs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.lineage import Copied, Lineage, Replicated
from subfleet.journal.networks import NetworkRecord
from subfleet.journal.totals import RunCosts, Timing
from subfleet.reporting.texts import describe_costs, describe_networks, describe_times, format_amount

CONFIG = Mlp(input_shape=(6,), class_count=3, widths=(8,), depths=(1,), group_size=4)


def network(name: str, parent: str | None, born_round: int, **fields: Any) -> NetworkRecord:
    lineage = Lineage(id=name, config=CONFIG, parent=parent, born_round=born_round)
    lineage = lineage if parent is None else replace(lineage, map=Replicated())
    return NetworkRecord(lineage=lineage, parameters=1500, forward_macs=1_250_000, **fields)


def retire(network_record: NetworkRecord, round_number: int) -> NetworkRecord:
    return replace(network_record, lineage=replace(network_record.lineage, retired_round=round_number))


CONFIGURED = retire(network("", None, 0), 0)
FIRST = network("m0", None, 0, trained={1: ("a", "b"), 2: ("a",)}, ready_round=1, owners=("a",), own_mean=0.5)
WIDER = network("m1", "m0", 2, wider=("s0", "s1"), trained={4: ("b",)}, ready_round=4)
DEEPER = network("m2", "m1", 5, deeper=("s1",), wider=("s0",))


def test_the_tree_is_indented_and_names_what_is_known() -> None:
    with_reason = replace(WIDER, lineage=replace(WIDER.lineage, reason="x"))
    assert list(describe_networks((CONFIGURED, FIRST, with_reason, DEEPER))) == [
        "Networks, each indented below its parent:",
        "  m0: 1.25 M MACs and 1.5 k parameters; trained by 2 devices in 2 rounds; accuracy 0.5000 for 1 device",
        "    m1: after round 2; x; 1.25 M MACs and 1.5 k parameters; ready for round 4; trained by 1 device in 1 round",
        "      m2: after round 5; 1.25 M MACs and 1.5 k parameters; trained by 0 devices in 0 rounds",
    ]
    assert "retired after round 6" in list(describe_networks((FIRST, retire(WIDER, 6))))[2]


def test_a_single_network_has_no_tree() -> None:
    assert list(describe_networks((CONFIGURED, FIRST))) == []
    assert list(describe_networks((FIRST,))) == list(describe_networks(())) == []


def texts_of_tree(networks: Sequence[NetworkRecord], rounds: int) -> list[str]:
    """The texts of a drawing, which matplotlib writes as comments beside their outlines."""
    from subfleet.reporting.plots import plot_family_tree

    return re.findall(r"<!-- (.*?) -->", plot_family_tree(networks, rounds))


@pytest.mark.slow
def test_the_picture_names_every_network_that_was_in_use_and_every_change() -> None:
    texts = texts_of_tree((CONFIGURED, FIRST, WIDER, DEEPER), 6)
    assert [text for text in texts if text in ("m0", "m1", "m2", "the first")] == ["m0", "m1", "m2"]
    assert {"s0 and s1 wider", "s0 wider", "s1 deeper"} <= {*texts}
    assert sum("1.25 M MACs, 1.5 k parameters" in text for text in texts) == 3
    assert sum("accuracy 0.5000" in text for text in texts) == 1


@pytest.mark.slow
def test_an_unchanged_network_is_labelled_by_its_map_and_many_cells_by_their_number() -> None:
    copied = replace(WIDER, wider=(), lineage=replace(WIDER.lineage, map=Copied()))
    assert "copied" in texts_of_tree((FIRST, copied), 6)
    many = replace(WIDER, wider=tuple(f"section{number}.block0" for number in range(9)))
    assert "9 cells wider" in texts_of_tree((FIRST, many), 6)


def test_costs_in_sentences() -> None:
    costs = RunCosts(
        forward_macs=2 * 10**9,
        training_macs=6 * 10**9,
        bytes_down=3_500_000,
        bytes_up=999,
        storage_bytes=10**6,
        expected_rounds=Timing(mean_s=2.0, deviation_s=0.5, count=3),
        expected_clients=Timing(mean_s=1.0, deviation_s=0.25, count=9),
    )
    assert describe_costs(costs) == (
        "All training took 6 G MACs (2 G forward), 3.5 MB down and 999 B up; the server keeps 1 MB of weights from "
        "round to round"
    )
    expected = (
        "A round was expected to take 2.00 s on average (deviation 0.50 s), a device's part of it 1.00 s on average "
    )
    for paced, grounds in (
        (0.5, "estimated from the speeds of links and, for 50% of the trainings, of devices"),
        (1.0, "estimated from the speeds of links and devices"),
    ):
        assert list(describe_times(replace(costs, paced=paced))) == [f"{expected}(deviation 0.25 s), {grounds}"]
    assert list(describe_times(costs)) == [
        "No device profile has a speed (macs_per_s), so the time of a round is not estimated"
    ]
    assert list(describe_times(RunCosts())) == []


@given(st.integers(0, 10**18))
def test_an_amount_is_within_half_a_percent(number: int) -> None:
    text = format_amount(number)
    digits, _, prefix = text.partition(" ")
    size = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[prefix]
    assert float(digits) * size == pytest.approx(number, rel=0.005)
    assert "e" not in digits
