"""What `subfleet runs networks` shows: the networks that runs ended with, by what one of their forward passes costs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from subfleet.cli.literal import literal
from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs
from subfleet.protocol.schema import to_plain
from subfleet.protocol.task_kinds import format_metrics
from subfleet.settings.summary import read_summary, understood_summary
from subfleet.settings.taking import networks_of

__all__ = ["network_rows", "show_networks"]

Row = dict[str, Any]


def network_rows(folders: Sequence[Path]) -> list[Row]:
    """The networks of some runs as plain data, the cheapest first.

    Each has the settings that stand under `[model]` in a run's file, and the run's accuracy where it ended with that
    network alone. Where a submodel of it is all that devices have trained, costs are those of that.

    Raises:
        FileError: a run's files cannot be read.
        ConfigError: a run is not over.
    """
    rows: list[Row] = []
    for folder in folders:
        with understood_summary(folder):
            rows += _rows(folder)
    return sorted(rows, key=lambda row: (row["forward_macs"], row["run"], row["network"]))


def _rows(folder: Path) -> Iterator[Row]:
    networks = networks_of(folder)
    summary = read_summary(folder) or {}
    for one in networks:
        network = network_of(one.config)
        ((parameters, forward_macs),) = Costs(network).of([one.model or network.full_architecture()])
        yield {
            "run": folder.name,
            "network": one.name,
            "submodel": one.model.name if one.model is not None and one.model != network.full_architecture() else "",
            "forward_macs": forward_macs,
            "parameters": parameters,
            "accuracy": summary["accuracy"] if len(networks) == 1 else None,
            "headline": summary.get("headline", "accuracy"),
            "metrics": summary.get("metrics", {}) if len(networks) == 1 else {},
            "born_round": one.born_round,
            "reason": one.reason,
            "model": to_plain(one.config),
        }


def show_networks(rows: Sequence[Row], console: Console) -> None:
    """Print them as a table."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for head in ("run", "network", "forward MACs", "parameters", "accuracy", "reason"):
        table.add_column(head, justify="left" if head in ("run", "network", "reason") else "right", overflow="fold")
    for row in rows:
        told = "" if row["accuracy"] is None else f"{row['accuracy']:.4f}"
        if row["headline"] != "accuracy" and row["metrics"]:
            told = format_metrics({row["headline"]: row["metrics"][row["headline"]]})
        cells = (
            row["run"],
            f"{row['network']}, {row['submodel']}" if row["submodel"] else row["network"],
            f"{row['forward_macs']:,}",
            f"{row['parameters']:,}",
            told,
            row["reason"],
        )
        table.add_row(*map(literal, cells))
    console.print(table)
