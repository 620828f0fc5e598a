"""`subfleet compare`: runs side by side, as a table, a plot, CSV and Markdown."""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subfleet.cli.failures import reporting
from subfleet.protocol.errors import FileError

if TYPE_CHECKING:
    from subfleet.reporting.comparing import Comparison

__all__ = ["compare"]


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs that are over.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for comparison.svg, comparison.csv and comparison.md.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what happens inside to standard error.")] = False,
) -> None:
    """Compare runs: each setting over its seeds, and its gain on the first one named, seed by seed."""
    with reporting(verbose=verbose):
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        from subfleet.cli.literal import literal
        from subfleet.protocol.task_kinds import METRICS
        from subfleet.reporting.comparing import COSTS, FIGURES, as_plain, as_rows, compared, read_folders

        found = compared(read_folders(folders))
        if out is not None:
            _write(out, found)
        if json:
            typer.echo(json_module.dumps(as_plain(found)))
            return
        rows, console = as_rows(found), Console()
        # Outliers, what clients found, and what it took, stand below, so that each table has room on a screen.
        judged = METRICS[found[0].entrant.headline].title
        further = ({"outliers"}, {*FIGURES.values()} - {judged}, {title for title, *_ in COSTS.values()})
        below = [heads for titles in further if (heads := [head for head in rows[0] if head in titles])]
        tables = [
            [head for head in rows[0] if not any(head in titles for titles in further)],
            *(["name", *heads] for heads in below),
        ]
        for heads in tables:
            table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
            for head in heads:
                first = head == "name"
                table.add_column(head, justify="left" if first else "right", overflow="fold", no_wrap=first)
            for row in rows:
                table.add_row(*(literal(row[head]) for head in heads))
            console.print(table)
        if out is not None:
            console.print(literal(f"comparison.svg, comparison.csv and comparison.md are in {out}"))


def _write(out: Path, found: "tuple[Comparison, ...]") -> None:
    from subfleet.reporting.comparing import as_csv, as_markdown
    from subfleet.reporting.plots import comparison_plot

    try:
        out.mkdir(parents=True, exist_ok=True)
        curves = {one.entrant.told: one.entrant.curve for one in found}
        (out / "comparison.svg").write_text(comparison_plot(curves, found[0].entrant.headline), encoding="utf-8")
        (out / "comparison.csv").write_text(as_csv(found), encoding="utf-8")
        (out / "comparison.md").write_text(as_markdown(found), encoding="utf-8")
    except OSError as error:
        raise FileError(f"{out} cannot be written: {error.strerror}; choose another folder with --out") from error
