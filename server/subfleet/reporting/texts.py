"""Sentences about a run and its rounds, and the columns of tables with a row for each client."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from subfleet.journal.networks import NetworkRecord, walk_descendants
from subfleet.journal.records import ClientRow, RoundRecord, RunResult
from subfleet.journal.totals import RunCosts, Timing, describe_outliers, sum_costs
from subfleet.protocol.task_kinds import METRICS

_MOST_WARNINGS = 3

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def describe_result(result: RunResult) -> str:
    """The headline metric at the end of a run, and the model that it describes."""
    if not result.rounds:
        return "No round was aggregated, so the model was not evaluated"
    if not result.quality:
        return "There is no model: the run was accounted, and nothing was trained"
    title = METRICS[result.headline].title
    return f"Test {title} of {result.rounds[-1].model_description}: {result.quality.removeprefix(f'{title} ')}"


def describe_ending(result: RunResult) -> Iterator[str]:
    """Sentences about the whole run; lines on its networks are indented."""
    yield from list_remarks(result)
    yield from describe_networks(result.networks)
    if result.tuning is not None and result.tuning.tau is not None:
        yield (
            f"Ranks of {result.tuning.networks} networks in the search and in the last evaluation: Kendall's tau "
            f"{result.tuning.tau:.2f}"
        )
    costs = sum_costs(result)
    yield describe_costs(costs)
    yield from describe_times(costs)


def list_remarks(result: RunResult) -> Iterator[str]:
    """Sentences about what may have spoiled the result: outliers, and data on another scale."""
    for text in describe_outliers(result.rounds):
        yield text[0].upper() + text[1:]
    warnings = find_data_warnings(result)
    for name in sorted(warnings)[:_MOST_WARNINGS]:
        yield f"Client {name}: {warnings[name]}"
    if len(warnings) > _MOST_WARNINGS:
        yield f"The data of {len(warnings) - _MOST_WARNINGS} more clients differ in scale from the evaluation data too"


def find_data_warnings(result: RunResult) -> dict[str, str]:
    """By client, the last warning that its inputs and the evaluation data differ in scale."""
    return {row.client_id: row.data_warning for record in result.rounds for row in record.clients if row.data_warning}


def describe_networks(networks: Sequence[NetworkRecord]) -> Iterator[str]:
    """The family tree with a line for each network, indented below its parent; nothing if only one was in use."""
    if sum(network.in_use for network in networks) < 2:
        return
    yield "Networks, each indented below its parent:"
    for depth, network in walk_descendants([network for network in networks if network.in_use]):
        yield f"{'  ' * (depth + 1)}{network.name}: {describe_network(network)}"


def describe_network(network: NetworkRecord) -> str:
    """The facts about a network in one line."""
    lineage = network.lineage
    facts = [f"after round {lineage.born_round}"] if lineage.born_round else []
    if lineage.reason:
        facts.append(lineage.reason)
    facts.append(f"{format_amount(network.forward_macs)} MACs and {format_amount(network.parameters)} parameters")
    if network.ready_round is not None and lineage.born_round:
        facts.append(f"ready for round {network.ready_round}")
    facts.append(f"trained by {_count(network.clients, 'device')} in {_count(tuple(network.trained), 'round')}")
    if network.quality:
        facts.append(f"{network.quality} for {_count(network.owners, 'device')}")
    if lineage.retired_round is not None:
        facts.append(f"retired after round {lineage.retired_round}")
    return "; ".join(facts)


def describe_costs(costs: RunCosts) -> str:
    """Multiplications and bytes of all rounds in a sentence."""
    return (
        f"All training took {format_amount(costs.training_macs)} MACs ({format_amount(costs.forward_macs)} forward), "
        f"{format_amount(costs.bytes_down)}B down and {format_amount(costs.bytes_up)}B up; the server keeps "
        f"{format_amount(costs.storage_bytes)}B of weights from round to round"
    )


def describe_times(costs: RunCosts) -> Iterator[str]:
    """Sentences on measured and expected times of rounds."""
    if costs.rounds is not None and costs.clients is not None:
        yield f"A round took {_format_timing(costs.rounds)}, a device's part of it {_format_timing(costs.clients)}"
    if costs.training_macs and not costs.paced:
        yield "No device profile has a speed (macs_per_s), so the time of a round is not estimated"
    elif costs.expected_rounds is not None and costs.expected_clients is not None:
        rounds, clients = _format_timing(costs.expected_rounds), _format_timing(costs.expected_clients)
        grounds = (
            "estimated from the speeds of links and devices"
            if costs.paced == 1
            else f"estimated from the speeds of links and, for {costs.paced:.0%} of the trainings, of devices"
        )
        yield f"A round was expected to take {rounds}, a device's part of it {clients}, {grounds}"


def format_amount(number: float) -> str:
    """A large number in a few characters, such as "1.25 M"; prefixes are decimal."""
    for size, prefix in _PREFIXES:
        if number >= size:
            return f"{number / size:.3g} {prefix}" if number < 999.5 * size else f"{number / size:.0f} {prefix}"
    return f"{number:.0f} "


def _format_timing(timing: Timing) -> str:
    return f"{timing.mean_s:.2f} s on average (deviation {timing.deviation_s:.2f} s)"


def _count(names: Sequence[object], what: str) -> str:
    return f"{len(names)} {what}{'s' * (len(names) != 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table with a row per client.

    Attributes:
        title: of the column.
        cell: the text of a row.
        rank: columns with the highest rank are left out first on narrow screens; 0 is always shown.
        words: whether it is text, which is aligned to the left and wrapped; else it is a number.
    """

    title: str
    cell: Callable[[ClientRow], str]
    rank: int
    words: bool = False


def _format_number(number: float | None, form: str, unit: float = 1) -> str:
    return "-" if number is None else format(number / unit, form)


def _format_slower_link(row: ClientRow) -> str:
    """Kilobytes that may be moved in the slower direction."""
    known = [size for size in (row.downlink_budget_bytes, row.uplink_budget_bytes) if size is not None]
    return _format_number(min(known, default=None), ".0f", 1000)


def _show_if_trained(text: Callable[[ClientRow], str]) -> Callable[[ClientRow], str]:
    return lambda row: text(row) if row.status == "aggregated" else "-"


def _describe_state(row: ClientRow) -> str:
    """The status of the client, the age of its model, why its weight was lowered, and why its update is an outlier."""
    age = f"its model was {row.staleness} version{'s' * (row.staleness > 1)} old" if row.staleness else ""
    reported = f"reported: {row.outlier}" if row.outlier and row.status == "aggregated" and row.scale == 1 else ""
    return "; ".join(text for text in (row.status, age, row.lowered, reported) if text)


CLIENT_COLUMNS: tuple[Column, ...] = (
    Column(title="device", cell=lambda row: row.client_id, rank=0, words=True),
    Column(title="profile", cell=lambda row: row.device, rank=12, words=True),
    Column(title="runtime", cell=lambda row: row.runtime or "-", rank=7, words=True),
    Column(title="free MB", cell=lambda row: _format_number(row.memory_free_bytes, ".1f", 1e6), rank=8),
    Column(title="budget MB", cell=lambda row: _format_number(row.budget_bytes, ".1f", 1e6), rank=2),
    Column(title="link kB", cell=_format_slower_link, rank=3),
    Column(title="submodel", cell=lambda row: row.architecture or "-", rank=0, words=True),
    Column(title="limit", cell=lambda row: row.limit or "-", rank=0, words=True),
    Column(title="planned MB", cell=lambda row: _format_number(row.planned_peak_bytes, ".1f", 1e6), rank=1),
    Column(
        title="measured MB",
        cell=_show_if_trained(lambda row: _format_number(row.measured_peak_bytes, ".1f", 1e6)),
        rank=4,
    ),
    Column(title="kB down", cell=lambda row: f"{row.bytes_down / 1000:.1f}", rank=9),
    Column(title="kB up", cell=lambda row: f"{row.bytes_up / 1000:.1f}", rank=10),
    Column(title="seconds", cell=_show_if_trained(lambda row: _format_number(row.seconds, ".2f")), rank=6),
    Column(title="loss", cell=_show_if_trained(lambda row: _format_number(row.loss, ".3f")), rank=5),
    Column(title="share", cell=_show_if_trained(lambda row: f"{row.share:.0%}"), rank=11),
    Column(title="state", cell=_describe_state, rank=0, words=True),
)


def describe_participation(record: RoundRecord) -> str:
    """How many devices took part in a round, and why the others did not."""
    text = f"{len(record.aggregated)} of {record.due} devices took part"
    return f"{text} ({record.left_out})" if record.left_out else text
