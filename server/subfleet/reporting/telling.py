"""What people read of a run when it is over, beside how good it is: its networks, and what it has cost."""

from collections.abc import Iterator, Sequence

from subfleet.journal.costs import RunCosts, Timing, sum_costs
from subfleet.journal.networks import NetworkRecord, walk_descendants
from subfleet.journal.outliers import count_outliers
from subfleet.journal.records import RunResult
from subfleet.protocol.task_kinds import METRICS

__all__ = [
    "amount",
    "costs_text",
    "data_warnings",
    "ending_lines",
    "network_facts",
    "network_lines",
    "reached_text",
    "remarks",
    "times_text",
]

_MOST_WARNINGS = 3

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def reached_text(result: RunResult) -> str:
    """How good the model is that a run ended with, and what that model is, in words."""
    if not result.rounds:
        return "No round was aggregated, so the model was not evaluated"
    title = METRICS[result.headline].title
    return f"Test {title} of {result.rounds[-1].model_told}: {result.told.removeprefix(f'{title} ')}"


def ending_lines(result: RunResult) -> Iterator[str]:
    """Sentences on a run as a whole, those on its networks indented below each other."""
    yield from remarks(result)
    yield from network_lines(result.networks)
    if result.tuning is not None and result.tuning.tau is not None:
        yield (
            f"Ranks of {result.tuning.networks} networks in the search and in the last evaluation: Kendall's tau "
            f"{result.tuning.tau:.2f}"
        )
    costs = sum_costs(result)
    yield costs_text(costs)
    yield from times_text(costs)


def remarks(result: RunResult) -> Iterator[str]:
    """Sentences on what may have spoiled the result: updates far from the others, and data on another scale."""
    for text in count_outliers(result.rounds).lines:
        yield text[0].upper() + text[1:]
    warnings = data_warnings(result)
    for name in sorted(warnings)[:_MOST_WARNINGS]:
        yield f"Client {name}: {warnings[name]}"
    if len(warnings) > _MOST_WARNINGS:
        yield f"The data of {len(warnings) - _MOST_WARNINGS} more clients do not go with the evaluation data either"


def data_warnings(result: RunResult) -> dict[str, str]:
    """By client, why its inputs and the evaluation data do not go together, as was said last."""
    return {row.client_id: row.data_warning for record in result.rounds for row in record.clients if row.data_warning}


def network_lines(networks: Sequence[NetworkRecord]) -> Iterator[str]:
    """The family tree, a line for each network, indented below what it grew from; none where one was in use."""
    if sum(one.in_use for one in networks) < 2:
        return
    yield "Networks, each below the one that it grew from:"
    for depth, one in walk_descendants([one for one in networks if one.in_use]):
        yield f"{'  ' * (depth + 1)}{one.name}: {network_facts(one)}"


def network_facts(one: NetworkRecord) -> str:
    """What there is to tell of a network, in one line."""
    lineage = one.lineage
    facts = [f"after round {lineage.born_round}"] if lineage.born_round else []
    if lineage.reason:
        facts.append(lineage.reason)
    facts.append(f"{amount(one.forward_macs)} MACs and {amount(one.parameters)} parameters")
    if one.ready_round is not None and lineage.born_round:
        facts.append(f"ready for round {one.ready_round}")
    facts.append(f"trained by {_count(one.clients, 'device')} in {_count(tuple(one.trained), 'round')}")
    if one.quality:
        facts.append(f"{one.quality} for {_count(one.owners, 'device')}")
    if lineage.retired_round is not None:
        facts.append(f"retired after round {lineage.retired_round}")
    return "; ".join(facts)


def costs_text(costs: RunCosts) -> str:
    """Multiplications and bytes of all training, in a sentence."""
    return (
        f"All training took {amount(costs.training_macs)} MACs ({amount(costs.forward_macs)} forward), "
        f"{amount(costs.bytes_down)}B down and {amount(costs.bytes_up)}B up; the server keeps "
        f"{amount(costs.storage_bytes)}B of weights from round to round"
    )


def times_text(costs: RunCosts) -> Iterator[str]:
    """Sentences on the time of rounds: what was measured, and what was expected."""
    if costs.rounds is not None and costs.clients is not None:
        yield f"A round took {_timing(costs.rounds)}, a device's part of it {_timing(costs.clients)}"
    if costs.training_macs and not costs.paced:
        yield "No device profile has a speed (macs_per_s), so the time of a round is not estimated"
    elif costs.expected_rounds is not None and costs.expected_clients is not None:
        rounds, clients = _timing(costs.expected_rounds), _timing(costs.expected_clients)
        grounds = (
            "by links and paces"
            if costs.paced == 1
            else f"by links, and paces that {costs.paced:.0%} of the trainings have"
        )
        yield f"A round was expected to take {rounds}, a device's part of it {clients}, {grounds}"


def amount(number: float) -> str:
    """A large number in a few characters, such as "1.25 M"; of bytes, megabytes are 10^6."""
    for size, prefix in _PREFIXES:
        if number >= size:
            return f"{number / size:.3g} {prefix}" if number < 999.5 * size else f"{number / size:.0f} {prefix}"
    return f"{number:.0f} "


def _timing(timing: Timing) -> str:
    return f"{timing.mean_s:.2f} s on average (deviation {timing.deviation_s:.2f} s)"


def _count(names: Sequence[object], what: str) -> str:
    return f"{len(names)} {what}{'s' * (len(names) != 1)}"
