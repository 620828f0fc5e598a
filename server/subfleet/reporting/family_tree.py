"""The family tree of a run's networks as SVG text: a line for each over the rounds, from where it grew to its end."""

from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from subfleet.journal.networks import NetworkRecord, walk_descendants
from subfleet.reporting.plots import COLOURS, as_svg
from subfleet.reporting.telling import amount

__all__ = ["family_tree"]

_WIDTH_INCHES, _LANE_INCHES = 10.5, 0.62
_MOST_NAMES = 2  # of cells that were changed alike; of more, the table has the names
_LEAST_MARK, _MORE_MARK = 18.0, 90.0  # points squared: where one device trained a network, and what most of them add


def family_tree(networks: Sequence[NetworkRecord], round_count: int) -> str:
    """The tree of those networks that were in use in some round.

    Args:
        networks: of a run, in the order in which they appeared.
        round_count: rounds that are over.
    """
    shown = [one for _, one in walk_descendants([one for one in networks if one.in_use])]
    lanes = {one.lineage.id: place for place, one in enumerate(shown)}
    most = max((len(names) for one in shown for names in one.trained.values()), default=1)

    def draw(axes: Axes) -> None:
        for place, one in enumerate(shown):
            _draw_line(axes, one, place, round_count, most)
            if one.lineage.parent in lanes:
                _draw_branch(axes, one, lanes, round_count)
        axes.set(xlabel="round", xlim=(-0.02 * round_count, round_count * 1.02), ylim=(len(shown) - 0.5, -0.5))
        axes.set_yticks(range(len(shown)), [one.name for one in shown])
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return as_svg(draw, width=_WIDTH_INCHES, height=0.8 + _LANE_INCHES * len(shown))


def _draw_line(axes: Axes, one: NetworkRecord, place: int, round_count: int, most: int) -> None:
    """A network over the rounds: awaited, trained, given up."""
    lineage, colour = one.lineage, COLOURS[place % len(COLOURS)]
    end = round_count if lineage.retired_round is None else lineage.retired_round
    ready = end if one.ready_round is None else min(one.ready_round, end)
    axes.plot([lineage.born_round, ready], [place, place], ":", color=colour, linewidth=1.5)
    axes.plot([ready, end], [place, place], "-", color=colour, linewidth=1.5, alpha=0.5)
    if lineage.retired_round is not None:
        axes.plot([end], [place], "x", color="#1b1b1b", zorder=4)
    axes.scatter(
        list(one.trained),
        [place] * len(one.trained),
        s=[_LEAST_MARK + _MORE_MARK * (len(names) - 1) / max(most - 1, 1) for names in one.trained.values()],
        color=colour,
        zorder=3,
        linewidths=0,
    )
    found = f"\n{one.quality}" if one.quality else ""
    facts = f"{amount(one.forward_macs)} MACs, {amount(one.parameters)} parameters{found}"
    axes.text(1.01, place, facts, transform=axes.get_yaxis_transform(), va="center", fontsize="small")


def _draw_branch(axes: Axes, one: NetworkRecord, lanes: Mapping[str, int], round_count: int) -> None:
    """From the line of the network that it grew from down to its own, with what was changed beside it."""
    born, place = one.lineage.born_round, lanes[one.lineage.id]
    line = {"arrowstyle": "-|>", "color": "#555555", "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (born, place), (born, lanes[one.lineage.parent or ""]), arrowprops=line)
    late = born > round_count / 2  # then there is more room to its left
    axes.annotate(
        "\n".join(_changes(one)) or one.lineage.map.TYPE,
        (born, place - 0.5),
        (-5 if late else 5, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
        fontsize="small",
        color="#555555",
    )


def _changes(one: NetworkRecord) -> Iterator[str]:
    for how, cells in (("wider", one.wider), ("deeper", one.deeper)):
        if cells:
            yield f"{' and '.join(cells) if len(cells) <= _MOST_NAMES else f'{len(cells)} cells'} {how}"
