"""The exporter's figures for a model are unknown where their file is damaged, and numbers in all other cases."""

import json
from pathlib import Path

import pytest

from subfleet.programs.supply import read_figures

UNKNOWN = {"max_abs_diff": None, "quantised_accuracy": None, "float_accuracy": None}


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '{"max_abs_diff": "x"}', '{"max_abs_diff": []}', '{"quantisation": [1]}'],
)
def test_a_damaged_file_has_no_figures(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.onnx.json").write_text(text, encoding="utf-8")
    assert read_figures(tmp_path / "model.onnx") == UNKNOWN


def test_a_missing_file_has_no_figures(tmp_path: Path) -> None:
    assert read_figures(tmp_path / "model.onnx") == UNKNOWN


def test_figures_are_numbers(tmp_path: Path) -> None:
    figures = {"max_abs_diff": 0, "quantisation": {"accuracy": 0.5, "float_accuracy": 1}}
    (tmp_path / "model.onnx.json").write_text(json.dumps(figures), encoding="utf-8")
    read = read_figures(tmp_path / "model.onnx")
    assert read == {"max_abs_diff": 0.0, "quantised_accuracy": 0.5, "float_accuracy": 1.0}
    assert {type(value) for value in read.values()} == {float}
