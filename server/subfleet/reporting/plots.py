"""The plots of a run, as SVG text that stands in the report by itself."""

import io
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from subfleet.journal.records import ClientRow, RoundRecord
from subfleet.protocol.task_kinds import METRICS

__all__ = ["COLOURS", "as_svg", "budget_plot", "bytes_plot", "comparison_plot", "memory_plot", "metric_plot"]

MEGABYTE = 1_000_000
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b", "#b59d00")
"""Told apart by people with any kind of colour vision (Okabe and Ito)."""
MARKERS = "osD^vPX*"
_SHARES = frozenset({"accuracy", "macro_f1", "auroc", "mean_iou"})


def metric_plot(rounds: Sequence[RoundRecord]) -> str:
    """The metric that the model is judged by, on test samples, over the rounds."""

    def draw(axes: Axes) -> None:
        found = [(record.round, value) for record in rounds if (value := record.value) is not None]
        headline = rounds[-1].headline if rounds else "accuracy"
        axes.plot([number for number, _ in found], [value for _, value in found], "o-", color=COLOURS[0])
        for number, value in found:
            axes.annotate(f"{value:.3f}", (number, value), (0, 7), textcoords="offset points")
        axes.set(xlabel="round", ylabel=f"test {METRICS[headline].title}")
        _limit(axes, headline, 1.08)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return as_svg(draw)


def budget_plot(rounds: Sequence[RoundRecord]) -> str:
    """Size of each device's submodel against its memory budget, one mark per device and round."""

    def draw(axes: Axes) -> None:
        for place, (client, rows) in enumerate(_by_client(rounds).items()):
            axes.scatter(
                [row.budget_bytes / MEGABYTE for row in rows],
                [row.parameters / 1000 for row in rows],
                color=COLOURS[place % len(COLOURS)],
                marker=MARKERS[place % len(MARKERS)],
                alpha=0.8,
                label=client,
            )
        axes.set(xlabel="memory budget (MB)", ylabel="parameters of the submodel (thousands)", xscale="log")
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        for axis_ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            axis_ticks(lambda value, _: f"{value:g}")
        axes.tick_params(axis="x", which="minor", labelsize="x-small")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")

    return as_svg(draw)


def memory_plot(rounds: Sequence[RoundRecord]) -> str:
    """Planned against measured peak memory; below the line, a device needed less than was planned."""

    def draw(axes: Axes) -> None:
        highest = 0.0
        for place, (client, rows) in enumerate(_by_client(rounds).items()):
            known = [(row.planned_peak_bytes, row.measured_peak_bytes) for row in rows]
            planned = [peak / MEGABYTE for peak, own in known if own is not None]
            measured = [own / MEGABYTE for _, own in known if own is not None]
            highest = max([highest, *planned, *measured])
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            axes.scatter(planned, measured, color=colour, marker=marker, alpha=0.8, label=client)
        axes.plot(
            [0, highest * 1.05], [0, highest * 1.05], "--", color="#999999", linewidth=1, label="planned = measured"
        )
        axes.set(xlabel="planned peak (MB)", ylabel="measured peak (MB)")
        axes.legend(fontsize="small")

    return as_svg(draw)


def bytes_plot(rounds: Sequence[RoundRecord]) -> str:
    """Bytes per round and device: to the device upwards, from the device downwards."""

    def draw(axes: Axes) -> None:
        clients = _by_client(rounds)
        width = 0.8 / max(len(clients), 1)
        for place, (client, rows) in enumerate(clients.items()):
            numbers = [record.round for record in rounds for row in record.clients if row in rows]
            at = [number + (place - (len(clients) - 1) / 2) * width for number in numbers]
            colour = COLOURS[place % len(COLOURS)]
            axes.bar(at, [row.bytes_down / 1000 for row in rows], width, color=colour, label=client)
            axes.bar(at, [-row.bytes_up / 1000 for row in rows], width, color=colour, alpha=0.55)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="round", ylabel="kB up  |  kB down")
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)

    return as_svg(draw)


def _limit(axes: Axes, metric: str, most: float) -> None:
    """Shares are shown from 0 to 1; other metrics as they come, from 0 where smaller is better."""
    if metric in _SHARES:
        axes.set_ylim(0, most)
    elif not METRICS[metric].larger_is_better:
        axes.set_ylim(bottom=0)


def comparison_plot(curves: Mapping[str, Mapping[int, Sequence[float]]], headline: str = "accuracy") -> str:
    """A test metric over the rounds, a line for each name: the mean over its runs, and from the worst to the best.

    Args:
        curves: by name and round, the metric of each run.
        headline: which metric it is.
    """

    def draw(axes: Axes) -> None:
        for place, (name, by_round) in enumerate(curves.items()):
            rounds, colour = list(by_round), COLOURS[place % len(COLOURS)]
            means = [fmean(found) for found in by_round.values()]
            axes.plot(rounds, means, marker=MARKERS[place % len(MARKERS)], markersize=4, color=colour, label=name)
            lows, highs = map(min, by_round.values()), map(max, by_round.values())
            axes.fill_between(rounds, list(lows), list(highs), color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="round", ylabel=f"test {METRICS[headline].title}")
        _limit(axes, headline, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize="small", loc="lower right" if METRICS[headline].larger_is_better else "upper right")

    return as_svg(draw)


def _by_client(rounds: Sequence[RoundRecord]) -> dict[str, list[ClientRow]]:
    """The aggregated rows of each client, in the order of the rounds."""
    clients = sorted({row.client_id for record in rounds for row in record.clients})
    return {
        client: [
            row for record in rounds for row in record.clients if row.client_id == client and row.status == "aggregated"
        ]
        for client in clients
    }


def as_svg(draw: Callable[[Axes], None], *, width: float = 6.2, height: float = 3.8) -> str:
    """What is drawn on axes of our style, as SVG text.

    Args:
        draw: draws it.
        width: of the figure, in inches.
        height: the same.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.25)
    draw(axes)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
