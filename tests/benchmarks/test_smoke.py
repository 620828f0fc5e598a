"""Every benchmark runs on its smallest input. Its figures are not checked."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


LONG = frozenset(
    {
        *(
            "aggregate",
            "attack_costs",
            "chains",
            "client_memory",
            "coordinator",
            "corpus",
            "emulated_time",
            "emulation",
            "fedadp",
            "fedoras",
            "fedtrans",
            "foreign_networks",
        ),
        *("liars", "outliers", "plan_memory", "plan_estimate", "quickstart", "search"),
    }
)
"""Benchmarks that take seconds each: they run fleets, export programs, or start many processes."""
CASES = [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in PROGRAMS]


@pytest.mark.slow
@pytest.mark.export
@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--smoke"])
    monkeypatch.delenv("SUBFLEET_DATA", raising=False)

    status: object = None
    try:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    except SystemExit as exit_:
        status = exit_.code

    output = capsys.readouterr()
    assert not status, output.err
    assert output.out + output.err, "it prints what it measured"
