"""The changes of a configuration are reported by key."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.server_rig import config

from subfleet.elastic.server_optimisers import ServerAdam
from subfleet.methods.fedavg import FedAvg
from subfleet.protocol.schema import canonical_json
from subfleet.settings.fingerprint import list_changes
from subfleet.settings.reading import read_run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import LogClock

VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
TABLES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), VALUES),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner | VALUES),
)


def _describe_changes(**changes: Any) -> str:
    return list_changes(json.loads(config().fingerprint()), json.loads(config(**changes).fingerprint()))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"rates": (1.0,)}, "rates from [0.5, 1.0] to [1.0]"),
        ({"clock": None}, 'clock from {"start_s": 0.0, "step_s": 10.0} to none'),
        ({"clock": LogClock(start_s=1.0, step_s=10.0)}, "clock.start_s from 0.0 to 1.0"),
        ({"method": FedAvg()}, 'method.type from "heterofl" to "fedavg"'),
        ({"memory_overhead_bytes": {"onnx": 7}}, "memory_overhead_bytes.onnx from unset to 7"),
        ({"data": DataSettings(test="d" * 70)}, f'data.test from "server.server_rig:evaluation" to "{"d" * 59}...'),
        ({"min_clients": 1, "keep_rounds": 9}, ""),
    ],
)
def test_each_change_names_its_key_and_both_values(changes: dict[str, Any], expected: str) -> None:
    assert _describe_changes(**changes) == expected


def test_a_new_table_is_named_as_a_whole() -> None:
    assert _describe_changes(server_optimiser=ServerAdam()).startswith('server_optimiser from none to {"beta1": 0.9, ')


def test_all_changes_are_named_and_long_values_are_cut_to_the_difference() -> None:
    before, after = ({f"key_{index}": value for index in range(10)} for value in (0, 1))
    assert list_changes(before, after) == ", ".join(f"key_{index} from 0 to 1" for index in range(10))
    message = list_changes({"a": "x" * 100 + "1" + "y" * 80}, {"a": "x" * 100 + "2"})
    assert message == f'a from ...{"x" * 10}1{"y" * 49}... to ...{"x" * 10}2"'


@pytest.mark.slow
@settings(max_examples=50)
@given(before=TABLES, after=TABLES)
def test_changes_are_reported_exactly_where_configurations_differ(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    texts = [canonical_json(table) for table in (before, after)]
    assert bool(list_changes(before, after)) == (texts[0] != texts[1])


def test_a_changed_preset_is_reported_by_its_keys(tmp_path: Path) -> None:
    def read_preset(name: str) -> dict[str, Any]:
        path = tmp_path / "run.toml"
        model = f'{{ preset = "{name}", input_shape = [3, 32, 32], class_count = 10 }}'
        path.write_text(f'name = "a"\ndata.test = "d"\nmodel = {model}')
        plain: dict[str, Any] = json.loads(read_run(path).fingerprint())
        return plain

    message = list_changes(read_preset("resnet18"), read_preset("resnet34"))
    assert message == "model.depths from [2, 2, 2, 2] to [3, 4, 6, 3]"
