"""The report of a run: one HTML page that needs no network and no script."""

from collections.abc import Sequence
from html import escape
from typing import Any

from subfleet.journal.evaluations import EvaluationRecord, describe_spread
from subfleet.journal.networks import NetworkRecord
from subfleet.journal.records import RoundRecord, RunResult
from subfleet.journal.totals import sum_costs
from subfleet.protocol.task_kinds import METRICS, format_metrics
from subfleet.reporting import texts

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 88rem; padding: 0 1rem; color: #1b1b1b }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); gap: 1rem }
figure { margin: 0 } figure svg { width: 100%; height: auto } figcaption { color: #555; font-size: .9rem }
.tree { max-width: 72rem }
.scroll { overflow-x: auto }
"""


def render_report(name: str, result: RunResult, record: dict[str, Any]) -> str:
    """The report of a run that has ended.

    Args:
        name: of the run.
        result: of the run.
        record: content of `summary.json`; its `models` are shown if there are any.
    """
    rounds = result.rounds
    metrics = rounds[-1].all_metrics if rounds else {}
    more = f" ({format_metrics(metrics)})" if len(metrics) > 1 else ""
    reached = (
        f"<p><b>{escape(texts.describe_result(result))}</b>{escape(more)} after {len(rounds)} rounds "
        f"(run <code>{escape(result.run_id)}</code>). Participation: <b>{result.participation:.1%}</b>.</p>"
    )
    if result.ended_early:
        reached += f"<p>It ended there because {escape(result.ended_early)}.</p>"
    status = escape(result.method_status)
    parts = [
        f"<h1>Subfleet run “{escape(name)}”</h1>",
        reached,
        f"<p>Method <code>{escape(result.method)}</code>, compared with its paper: {status}.</p>",
        *(f"<p>{escape(text)}.</p>" for text in texts.list_remarks(result)),
        _render_plots(rounds),
        _render_evaluation(result.evaluations),
        _render_costs(result),
        _render_networks(result.networks, len(rounds)),
        _render_models(record.get("models", []), result.headline),
        *(_render_round(finished) for finished in rounds),
    ]
    return _render_page(name, parts)


def render_failure(name: str, why: str) -> str:
    """A page that says why the report could not be made."""
    hint = "Nothing is lost: summary.json, rounds.csv and clients.csv have the same content."
    parts = [
        f"<h1>Subfleet run “{escape(name)}”</h1>",
        f"<p>The report cannot be made ({escape(why)}). {hint}</p>",
    ]
    return _render_page(name, parts)


def render_status(
    name: str, state: str, rounds: Sequence[RoundRecord], away: Sequence[tuple[str, str, str]] = ()
) -> str:
    """A page that reloads itself every few seconds: the state of a run, and its rounds, the newest first.

    Args:
        name: of the run.
        state: one sentence.
        rounds: finished rounds in order.
        away: absent devices: name, reason and time when they were last seen.
    """
    parts = [
        f"<h1>Subfleet run “{escape(name)}”</h1>",
        f'<p role="status">{escape(state)}</p>',
        *([f"<h2>Away</h2>{_render_table(['device', 'reason', 'last seen'], away)}"] if away else []),
        *(_render_round(record) for record in reversed(rounds)),
        '<p><a href="/docs">HTTP API</a></p>',
    ]
    return _render_page(name, parts, '<meta http-equiv="refresh" content="3">')


def _render_page(name: str, parts: Sequence[str], more_head: str = "") -> str:
    head = f'<meta charset="utf-8">{more_head}<title>Subfleet: {escape(name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _render_plots(rounds: Sequence[RoundRecord]) -> str:
    from subfleet.reporting import plots  # matplotlib takes a second to load, and only reports need it

    title = METRICS[rounds[-1].headline if rounds else "accuracy"].title
    model = f" of {rounds[-1].model_description}" if rounds else ""
    measured = any(row.measured_peak_bytes is not None for record in rounds for row in record.clients)
    figures = (
        (plots.plot_metric(rounds), f"{title[0].upper()}{title[1:]}{model} on the evaluation samples."),
        (
            plots.plot_budgets(rounds),
            "Size of each submodel against the memory budget; a small submodel with a large budget means a slow link.",
        ),
        *([(plots.plot_memory(rounds), "Planned against measured peak memory of training.")] if measured else []),
        (plots.plot_bytes(rounds), "Bytes moved per round. The first round also carries the programs."),
    )
    cells = "".join(f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>" for svg, text in figures)
    return f'<div class="plots">{cells}</div>'


def _render_evaluation(records: Sequence[EvaluationRecord]) -> str:
    """The last evaluation of devices on held-out samples of their own."""
    if not records:
        return ""
    headline = records[-1].headline
    head = METRICS[headline].title
    titles = ["device", "profile", "submodel", head, "loss", "held-out samples", "kB down", "seconds", "state"]
    rows = [
        (
            row.client_id,
            row.device,
            row.architecture,
            _format_cell(row.value(headline) if row.label_count else None),
            _format_cell(row.loss if row.label_count else None),
            _format_cell(row.sample_count if row.label_count else None),
            f"{row.bytes_down / 1000:.1f}",
            "-" if row.seconds is None else f"{row.seconds:.2f}",
            row.status,
        )
        for row in records[-1].clients
    ]
    spread = describe_spread(records[-1])
    return (
        f"<h2>Evaluation by devices</h2><p>{escape(spread[0].upper() + spread[1:])}.</p>{_render_table(titles, rows)}"
    )


def _render_costs(result: RunResult) -> str:
    """The costs of all rounds."""
    costs = sum_costs(result)
    sentences = " ".join(f"{escape(text)}." for text in (texts.describe_costs(costs), *texts.describe_times(costs)))
    return f"<h2>Cost</h2><p>{sentences}</p>"


def _render_networks(networks: Sequence[NetworkRecord], round_count: int) -> str:
    """The family tree of the networks, if there is more than one."""
    if len(networks) < 2:
        return ""
    from subfleet.reporting.plots import plot_family_tree

    rows = [_build_network_row(record) for record in networks]
    caption = (
        "Networks over the rounds. A dot is a round in which devices trained the network, larger for more devices; "
        "a network is dotted until it can be trained."
    )
    tree = plot_family_tree(networks, round_count)
    figure = f'<figure class="tree">{tree}<figcaption>{caption}</figcaption></figure>'
    return f"<h2>Networks</h2>{figure}{_render_table(list(rows[0]), [list(row.values()) for row in rows])}"


def _build_network_row(network: NetworkRecord) -> dict[str, str]:
    """The cells of a network by the titles of their columns."""
    lineage = network.lineage
    grown = lineage.parent is not None
    return {
        "network": network.name,
        "grown from": (lineage.parent or "the first") if grown else "-",
        "by": lineage.map.TYPE if grown else "-",
        "changed": ", ".join(network.list_changes()) or "-",
        "after round": _format_cell(lineage.born_round),
        "ready in round": _format_cell(network.ready_round),
        "until round": _format_cell(lineage.retired_round),
        "MACs": texts.format_amount(network.forward_macs),
        "parameters": texts.format_amount(network.parameters),
        "rounds": str(len(network.trained)),
        "devices": str(len(network.clients)),
        "training MACs": texts.format_amount(network.training_macs),
        METRICS[network.metric].title: _format_cell(network.own_mean),
        "of devices": str(len(network.owners)) if network.owners else "-",
        "why": lineage.reason or "-",
    }


def _render_models(models: Sequence[dict[str, Any]], headline: str) -> str:
    if not models:
        return ""
    columns = ["client_id", "file", "architecture", "bytes", "max_abs_diff"]
    titles = ["device", "model", "submodel", "bytes", "difference from PyTorch"]
    if any(model.get("own") is not None for model in models):  # not measured with real devices
        columns.append("own")
        titles.append(f"{METRICS[headline].title} on its own samples")
    if any(model.get("quantised_accuracy") is not None for model in models):
        columns += ["quantised_accuracy", "float_accuracy"]
        titles += ["accuracy in 8 bits, evaluation samples", "the same in float32"]
    rows = [tuple(_format_cell(model.get(column)) for column in columns) for model in models]
    return f"<h2>Each device's own model</h2>{_render_table(titles, rows)}"


def _render_round(record: RoundRecord) -> str:
    title = f"Round {record.round}: {record.quality or 'no model'}"
    title += "" if record.seconds is None else f", {record.seconds:.1f} s"
    if record.log_time_s is not None:
        title += f", logs read at {record.log_time_s:g} s"
    title += f"; {texts.describe_participation(record)}"
    titles = [column.title for column in texts.CLIENT_COLUMNS]
    rows = [[column.cell(row) for column in texts.CLIENT_COLUMNS] for row in record.clients]
    return f"<h2>{escape(title)}</h2>{_render_table(titles, rows)}"


def _render_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
    return "-" if value is None else str(value)
