"""The results: tables to print, and one JSON object."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from step_benchmark.parity import Parity

BOUNDS = {"onnx": (1.1, 1.5), "executorch": (2.0, 3.0)}
"""Bounds on the median and the worst ratio of step times."""
PARITY_BOUND = 4.0
ABS_DIFF_BOUND = 1e-5
LOSS_FALL_BOUND = 0.1


@dataclass(kw_only=True)
class Result:
    """The figures of one model on one target; unmeasured ones are absent.

    Attributes:
        model: name in the zoo.
        target: "onnx" or "executorch".
        smooth: whether `max_abs_diff` counts.
        error: why there is no program; empty if there is one.
        export_s: seconds to write and verify the program.
        cached_first_ms: milliseconds to find it in a newly opened cache.
        cached_ms: milliseconds to find it again.
        program_bytes: its size.
        step_ms: its step time by number of threads.
        eager_ms: PyTorch's best step time, by number of threads.
        eager_layout: the memory layout of that time.
        parity: distances from PyTorch.
        planned_bytes: planned peak memory of the program.
        measured_bytes: growth of a fresh process; 0 if it was not measured.
    """

    model: str
    target: str
    smooth: bool
    error: str = ""
    export_s: float = 0.0
    cached_first_ms: float = 0.0
    cached_ms: float = 0.0
    program_bytes: int = 0
    step_ms: dict[int, float] = field(default_factory=dict)
    eager_ms: dict[int, float] = field(default_factory=dict)
    eager_layout: dict[int, str] = field(default_factory=dict)
    parity: Parity | None = None
    planned_bytes: int = 0
    measured_bytes: int = 0

    @property
    def ratios(self) -> dict[int, float]:
        """Step time over eager's, by number of threads."""
        return {threads: self.step_ms[threads] / self.eager_ms[threads] for threads in self.step_ms}

    @property
    def planned_over_measured(self) -> float | None:
        """Planned over measured peak memory; None if it was not measured."""
        return self.planned_bytes / self.measured_bytes if self.measured_bytes else None


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """The object that `--json` prints; figures that were not measured are null."""
    planned = [share for result in results if (share := result.planned_over_measured) is not None]
    return {
        **{target: _summarise_target([result for result in results if result.target == target]) for target in BOUNDS},
        "planned_over_measured": {"min": min(planned, default=None), "max": max(planned, default=None)},
        "models": [_encode(result) for result in results],
    }


def _summarise_target(results: Sequence[Result]) -> dict[str, float | None]:
    ratios = [ratio for result in results for ratio in result.ratios.values()]
    parities = [(result.smooth, result.parity) for result in results if result.parity is not None]
    return {
        "median_ratio": statistics.median(ratios) if ratios else None,
        "worst_ratio": max(ratios, default=None),
        "max_abs_diff": max((parity.max_abs_diff for smooth, parity in parities if smooth), default=None),
        "distance_over_eager": max((parity.distance_over_eager for _, parity in parities), default=None),
    }


def _encode(result: Result) -> dict[str, Any]:
    plain = asdict(result)
    plain["ratios"] = result.ratios
    plain["planned_over_measured"] = result.planned_over_measured
    finite: dict[str, Any] = _replace_infinities(plain)
    return finite


def _replace_infinities(value: Any) -> Any:
    """Replace infinities by strings, since JSON has none."""
    if isinstance(value, Mapping):
        return {str(key): _replace_infinities(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_tables(results: Sequence[Result], console: Console) -> None:
    """Print times and memory, parity, and models that could not be exported."""
    measured = [result for result in results if not result.error]
    if measured:
        console.print(_build_time_table(measured))
        console.print(_build_parity_table(measured))
    for result in results:
        if result.error:
            console.print(f"{result.model} on {result.target}: {result.error}", markup=False, highlight=False)
    summary = summarise(results)
    for target, (median, worst) in BOUNDS.items():
        figures = summary[target]
        if figures["median_ratio"] is not None:
            console.print(
                f"{target}: median ratio {figures['median_ratio']:.2f} (at most {median}), "
                f"worst {figures['worst_ratio']:.2f} (at most {worst})",
                highlight=False,
            )


def _build_time_table(results: Sequence[Result]) -> Table:
    threads = sorted({number for result in results for number in result.step_ms})
    table = Table(title="Step times against eager PyTorch at its best, and memory")
    for name in ("model", "target"):
        table.add_column(name)
    for number in threads:
        table.add_column(f"eager ms, {number} thr", justify="right")
        table.add_column("ms", justify="right")
        table.add_column("ratio", justify="right")
    for name in ("export s", "found ms", "program MB", "planned MB", "planned / measured"):
        table.add_column(name, justify="right")
    for result in results:
        cells = [result.model, result.target]
        for number in threads:
            if number in result.step_ms:
                bound = BOUNDS[result.target][1]
                eager = f"{result.eager_ms[number]:.2f} {'cl' if result.eager_layout[number] != 'contiguous' else ''}"
                ratio = _mark(result.ratios[number], result.ratios[number] <= bound, "{:.2f}")
                cells += [eager, f"{result.step_ms[number]:.2f}", ratio]
            else:
                cells += ["", "", ""]
        share = result.planned_over_measured
        cells += [
            f"{result.export_s:.1f}",
            f"{result.cached_ms:.2f}",
            f"{result.program_bytes / 1e6:.2f}",
            f"{result.planned_bytes / 1e6:.1f}",
            "" if share is None else _mark(share, 0.95 <= share <= 1.1, "{:.2f}"),
        ]
        table.add_row(*cells)
    return table


def _build_parity_table(results: Sequence[Result]) -> Table:
    table = Table(title="Distance from PyTorch in double precision, by that of PyTorch in single precision")
    names = ("1 step, worst tensor", "its name", "10 steps", "10 steps, worst tensor", "max abs diff", "loss falls by")
    for name in ("model", "target", *names):
        table.add_column(name)
    for result in results:
        parity = result.parity
        if parity is None:
            continue
        table.add_row(
            result.model,
            result.target,
            _mark(parity.one_step_over_eager, parity.one_step_over_eager <= PARITY_BOUND, "{:.2f}"),
            parity.one_step_worst_tensor,
            _mark(parity.distance_over_eager, parity.distance_over_eager <= PARITY_BOUND, "{:.2f}"),
            f"{parity.worst_tensor_over_eager:.2f}",
            _mark(parity.max_abs_diff, not result.smooth or parity.max_abs_diff <= ABS_DIFF_BOUND, "{:.1e}"),
            _mark(parity.loss_fall, parity.loss_fall >= LOSS_FALL_BOUND, "{:.0%}"),
        )
    return table


def _mark(value: float, good: bool, form: str) -> str:
    return form.format(value) if good else f"[bold red]{form.format(value)} ![/bold red]"
