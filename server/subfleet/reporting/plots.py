"""The plots of a run as SVG text."""

import io
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from subfleet.journal.networks import NetworkRecord, walk_descendants
from subfleet.journal.records import ClientRow, RoundRecord
from subfleet.protocol.task_kinds import METRICS
from subfleet.reporting.spending import AXES, Axis
from subfleet.reporting.texts import format_amount

MEGABYTE = 1_000_000
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b", "#b59d00")
"""Distinguishable with any kind of colour vision (Okabe and Ito)."""
MARKERS = "osD^vPX*"
_MOST_ENTRIES = 20  # of a legend
_SHARES = frozenset({"accuracy", "macro_f1", "auroc", "mean_iou"})


def plot_metric(rounds: Sequence[RoundRecord]) -> str:
    """The headline metric on evaluation samples over the rounds."""

    def draw(axes: Axes) -> None:
        points = [(record.round, value) for record in rounds if (value := record.value) is not None]
        headline = rounds[-1].headline if rounds else "accuracy"
        axes.plot([number for number, _ in points], [value for _, value in points], "o-", color=COLOURS[0])
        for number, value in points:
            axes.annotate(f"{value:.3f}", (number, value), (0, 7), textcoords="offset points")
        _scale(axes, headline, 1.08)

    return draw_svg(draw)


def plot_budgets(rounds: Sequence[RoundRecord]) -> str:
    """Size of each device's submodel against its memory budget, one mark per device and round."""

    def draw(axes: Axes) -> None:
        for style, rows in _group_by_client(rounds):
            budgets, sizes = [row.budget_bytes / MEGABYTE for row in rows], [row.parameters / 1000 for row in rows]
            axes.scatter(budgets, sizes, alpha=0.8, **style)
        axes.set(xlabel="memory budget (MB)", ylabel="parameters of the submodel (thousands)", xscale="log")
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        for set_formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            set_formatter(lambda value, _: f"{value:g}")
        axes.tick_params(axis="x", which="minor", labelsize="x-small")
        axes.set_ylim(bottom=0)
        _add_legend(axes)

    return draw_svg(draw)


def plot_memory(rounds: Sequence[RoundRecord]) -> str:
    """Planned against measured peak memory."""

    def draw(axes: Axes) -> None:
        end = 0.0
        for style, rows in _group_by_client(rounds):
            peaks = [(row.planned_peak_bytes, row.measured_peak_bytes) for row in rows]
            planned = [peak / MEGABYTE for peak, own in peaks if own is not None]
            measured = [own / MEGABYTE for _, own in peaks if own is not None]
            end = max([end, *(1.05 * peak for peak in (*planned, *measured))])
            axes.scatter(planned, measured, alpha=0.8, **style)
        axes.plot([0, end], [0, end], "--", color="#999999", linewidth=1, label="planned = measured")
        axes.set(xlabel="planned peak (MB)", ylabel="measured peak (MB)")
        _add_legend(axes)

    return draw_svg(draw)


def plot_bytes(rounds: Sequence[RoundRecord]) -> str:
    """Bytes per round and device: down as bars upwards, up as bars downwards."""

    def draw(axes: Axes) -> None:
        clients = _group_by_client(rounds)
        width = 0.8 / max(len(clients), 1)
        for index, (style, rows) in enumerate(clients):
            numbers = [record.round for record in rounds for row in record.clients if row in rows]
            at = [number + (index - (len(clients) - 1) / 2) * width for number in numbers]
            axes.bar(at, [row.bytes_down / 1000 for row in rows], width, color=style["color"], label=style["label"])
            axes.bar(at, [-row.bytes_up / 1000 for row in rows], width, color=style["color"], alpha=0.55)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="round", ylabel="kB up  |  kB down")
        _add_legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)

    return draw_svg(draw)


def _scale(axes: Axes, metric: str, most: float) -> None:
    """Axes for a metric over the rounds: fractions are shown from 0 to 1, metrics that should be small from 0."""
    axes.set(xlabel="round", ylabel=f"test {METRICS[metric].title}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if metric in _SHARES:
        axes.set_ylim(0, most)
    elif not METRICS[metric].larger_is_better:
        axes.set_ylim(bottom=0)


def _add_legend(axes: Axes, **options: Any) -> None:
    """A legend, unless it has so many entries that it would leave no room for the plot."""
    if len(axes.get_legend_handles_labels()[1]) <= _MOST_ENTRIES:
        axes.legend(fontsize="small", **options)


def plot_comparison(
    traces: Mapping[str, Sequence[tuple[float, Sequence[float]]]], headline: str = "accuracy", axis: Axis = "rounds"
) -> str:
    """A metric over what was spent: for each name the mean over its runs, and the range from the worst to the best.

    Args:
        traces: by name, what was spent by the end of each round, and the metric of each run then.
        headline: name of the metric.
        axis: what was spent.
    """
    title, unit, _ = AXES[axis]

    def draw(axes: Axes) -> None:
        for index, (name, points) in enumerate(traces.items()):
            spent, style = [at / unit for at, _ in points], _choose_style(index, name)
            axes.plot(spent, [fmean(values) for _, values in points], markersize=4, **style)
            lows, highs = [min(values) for _, values in points], [max(values) for _, values in points]
            axes.fill_between(spent, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
        _scale(axes, headline, 1.02)
        if axis != "rounds":
            axes.set(xlabel=title)
            axes.xaxis.set_major_locator(MaxNLocator())
        _add_legend(axes, loc="lower right" if METRICS[headline].larger_is_better else "upper right")

    return draw_svg(draw)


def _choose_style(index: int, label: str) -> dict[str, Any]:
    """Colour, marker and label of a series."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "label": label}


def _group_by_client(rounds: Sequence[RoundRecord]) -> list[tuple[dict[str, Any], list[ClientRow]]]:
    """The style and the aggregated rows of each client, in the order of the rounds."""
    clients = sorted({row.client_id for record in rounds for row in record.clients})
    aggregated = [row for record in rounds for row in record.aggregated]
    return [
        (_choose_style(index, client), [row for row in aggregated if row.client_id == client])
        for index, client in enumerate(clients)
    ]


def draw_svg(draw: Callable[[Axes], None], *, width: float = 6.2, height: float = 3.8) -> str:
    """The SVG text of a figure; `draw` draws on its axes, and its size is in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.25)
    draw(axes)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


_TREE_WIDTH, _LANE_INCHES = 10.5, 0.62
_MOST_NAMES = 2  # of cells with the same change; of more, only the number is shown
_LEAST_MARK, _MORE_MARK = 18.0, 90.0  # points squared: for one device, and in addition for the most devices


def plot_family_tree(networks: Sequence[NetworkRecord], round_count: int) -> str:
    """The family tree of the networks that were in use: a line for each over the finished rounds.

    Args:
        networks: of a run, in the order in which they appeared.
        round_count: number of finished rounds.
    """
    shown = [network for _, network in walk_descendants([network for network in networks if network.in_use])]
    lanes = {network.lineage.id: lane for lane, network in enumerate(shown)}
    most = max((len(names) for network in shown for names in network.trained.values()), default=1)

    def draw(axes: Axes) -> None:
        for lane, network in enumerate(shown):
            _draw_line(axes, network, lane, round_count, most)
            if network.lineage.parent in lanes:
                _draw_branch(axes, network, lanes, round_count)
        axes.set(xlabel="round", xlim=(-0.02 * round_count, round_count * 1.02), ylim=(len(shown) - 0.5, -0.5))
        axes.set_yticks(range(len(shown)), [network.name for network in shown])
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return draw_svg(draw, width=_TREE_WIDTH, height=0.8 + _LANE_INCHES * len(shown))


def _draw_line(axes: Axes, network: NetworkRecord, lane: int, round_count: int, most: int) -> None:
    """The line of a network: dotted until it can be trained, with a dot for each round of training."""
    lineage, colour = network.lineage, COLOURS[lane % len(COLOURS)]
    end = round_count if lineage.retired_round is None else lineage.retired_round
    ready = end if network.ready_round is None else min(network.ready_round, end)
    axes.plot([lineage.born_round, ready], [lane, lane], ":", color=colour, linewidth=1.5)
    axes.plot([ready, end], [lane, lane], "-", color=colour, linewidth=1.5, alpha=0.5)
    if lineage.retired_round is not None:
        axes.plot([end], [lane], "x", color="#1b1b1b", zorder=4)
    axes.scatter(
        list(network.trained),
        [lane] * len(network.trained),
        s=[_LEAST_MARK + _MORE_MARK * (len(names) - 1) / max(most - 1, 1) for names in network.trained.values()],
        color=colour,
        zorder=3,
        linewidths=0,
    )
    quality = f"\n{network.quality}" if network.quality else ""
    facts = f"{format_amount(network.forward_macs)} MACs, {format_amount(network.parameters)} parameters{quality}"
    axes.text(1.01, lane, facts, transform=axes.get_yaxis_transform(), va="center", fontsize="small")


def _draw_branch(axes: Axes, network: NetworkRecord, lanes: Mapping[str, int], round_count: int) -> None:
    """An arrow from the line of the parent to that of the network, labelled with the changes."""
    born, lane = network.lineage.born_round, lanes[network.lineage.id]
    line = {"arrowstyle": "-|>", "color": "#555555", "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (born, lane), (born, lanes[network.lineage.parent or ""]), arrowprops=line)
    late = born > round_count / 2  # there is more room to the left
    axes.annotate(
        "\n".join(network.list_changes(_MOST_NAMES)) or network.lineage.map.TYPE,
        (born, lane - 0.5),
        (-5 if late else 5, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
        fontsize="small",
        color="#555555",
    )
