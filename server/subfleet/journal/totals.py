"""Totals of a run: the costs of its training, and the outliers among its updates by client and treatment. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from subfleet.journal.records import ClientRow, RoundRecord, RunResult

_MOST_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Mean, standard deviation (of the whole population) and number of times."""

    mean_s: float
    deviation_s: float
    count: int

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Timing | None":
        """The timing of these seconds; None without any."""
        known = tuple(seconds)
        if not known:
            return None
        return cls(mean_s=statistics.fmean(known), deviation_s=statistics.pstdev(known), count=len(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """The costs of a run's training.

    The costs of trainings without an update, and of attempts that aggregated nothing, are unknown and not included.

    Attributes:
        forward_macs: multiply-accumulates of the forward passes over all samples in all epochs.
        training_macs: three times these.
        bytes_down: payload bytes published to clients in all rounds: weights, new programs, tasks, messages.
        bytes_up: payload bytes received from them.
        storage_bytes: of all tensors that the server kept from one round to the next, at most.
        rounds: seconds of the rounds, each from its announcement until its model was evaluated; None if none was
            measured.
        clients: seconds of the clients' parts, each from the sending of its task until its update was stored.
        expected_clients: the same, estimated from costs and the reported paces and links of clients; None if no client
            reports any.
        expected_rounds: the same of rounds, by the slowest client of each.
        paced: fraction of the trainings with a reported pace; for the others, only links count.
    """

    forward_macs: int = 0
    training_macs: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    storage_bytes: int = 0
    rounds: Timing | None = None
    clients: Timing | None = None
    expected_rounds: Timing | None = None
    expected_clients: Timing | None = None
    paced: float = 0.0


def sum_costs(result: RunResult) -> RunCosts:
    """The costs of a run so far."""
    rounds = result.rounds
    rows = [row for record in rounds for row in record.clients]
    trained = [row for row in rows if row.sample_passes]
    expected = [
        [row.expected_s for row in record.clients if row.sample_passes and row.expected_s > 0] for record in rounds
    ]
    return RunCosts(
        forward_macs=sum(row.forward_macs * row.sample_passes for row in trained),
        training_macs=sum(row.training_macs for row in trained),
        bytes_down=sum(row.bytes_down for row in rows),
        bytes_up=sum(row.bytes_up for row in rows),
        storage_bytes=max((record.model_bytes for record in rounds), default=0),
        rounds=Timing.of(record.seconds for record in rounds if record.seconds is not None),
        clients=Timing.of(row.took_s for row in trained if row.took_s is not None),
        expected_rounds=Timing.of(max(each) for each in expected if each),
        expected_clients=Timing.of(seconds for each in expected for seconds in each),
        paced=sum(row.expected_training_s > 0 for row in trained) / len(trained) if trained else 0.0,
    )


def count_outliers(rounds: Sequence[RoundRecord]) -> dict[str, dict[str, int]]:
    """The number of rounds in which a client's update was an outlier, by treatment and client.

    Returns:
        scaled: the update counted less.
        left_out: the update did not count: it was refused, or its client was excluded.
        reported: the outlier was reported, and the update counted in full.
    """
    counts: dict[str, Counter[str]] = {"scaled": Counter(), "left_out": Counter(), "reported": Counter()}
    for row in (row for record in rounds for row in record.clients if row.outlier):
        counts[_classify(row)][row.client_id] += 1
    return {treatment: dict(sorted(counted.items())) for treatment, counted in counts.items()}


def describe_outliers(rounds: Sequence[RoundRecord], *, reported: bool = True) -> tuple[str, ...]:
    """A sentence on the outliers of each treatment; `reported` includes those that counted in full."""
    words = {"scaled": "updates scaled down", "left_out": "updates left out"}
    if reported:
        words["reported"] = "updates far from the others, which counted in full"
    counts = count_outliers(rounds)
    return tuple(
        f"{text}: {_join_names(counts[treatment])} (of {len(rounds)} rounds)"
        for treatment, text in words.items()
        if counts[treatment]
    )


def _classify(row: ClientRow) -> str:
    if row.status != "aggregated":
        return "left_out"
    return "scaled" if row.scale < 1 else "reported"


def _join_names(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    parts = [f"{name} in {counts[name]}" for name in ordered[:_MOST_NAMES]]
    rest = len(ordered) - _MOST_NAMES
    return ", ".join(parts) + (f" and {rest} more clients" if rest > 0 else "")
