"""Records of evaluations by devices on held-out data: a row for each client, and the spread of the figures."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from subfleet.protocol.task_kinds import METRICS, better


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One client in an evaluation.

    Attributes:
        device: the name of its device profile, which is its tier.
        architecture: display name of the submodel that it would be given.
        architecture_id: identity of this submodel.
        loss: None if it did not evaluate.
        accuracy: None if it did not evaluate, or the task has no accuracy.
        sample_count: of its held-out data; 0 if it did not evaluate, as are the numbers below.
        label_count: number of counted labels.
        class_counts: counted labels of each class, if they were requested.
        class_correct: the correctly predicted ones of these.
        bytes_down: payload bytes published to it during the evaluation.
        bytes_up: payload bytes received from it.
        seconds: from the task's arrival on the device to its answer; None if not measured.
        status: "evaluated", or why it did not evaluate, such as "missing: no answer came in time".
        network: id of the network of the submodel; empty for the first network.
        metrics: further metrics of the run's kind of task.
    """

    client_id: str
    device: str
    architecture: str
    architecture_id: str
    loss: float | None = None
    accuracy: float | None = None
    sample_count: int = 0
    label_count: int = 0
    class_counts: tuple[int, ...] = ()
    class_correct: tuple[int, ...] = ()
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float | None = None
    status: str = "evaluated"
    network: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        """A metric, or the loss; None if unknown."""
        return {"accuracy": self.accuracy, "loss": self.loss, **self.metrics}.get(metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The spread of a figure over clients, each counted once.

    Quartiles are interpolated between the sorted values (the seventh definition of Hyndman and Fan); with one client,
    all are its value.

    Attributes:
        clients: number of clients, 1 or more.
        worst: the least favourable value; worst_client: the client with it, of equals the first by name.
        tiers: mean of each tier, sorted by name.
        worst_tier: the tier with the least favourable mean; worst_tier_mean: this mean.
        interquartile_range: difference of the quartiles.
    """

    clients: int
    mean: float
    lower_quartile: float
    upper_quartile: float
    worst: float
    worst_client: str
    tiers: Mapping[str, float]
    worst_tier: str
    interquartile_range: float
    worst_tier_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The evaluation after a round, with a row for each client that had a task; seconds as in `RoundRecord`.

    Attributes:
        headline: the metric that models are judged by.
        together: metrics over the samples of all clients that answered, as one data set.
    """

    round: int
    seconds: float | None
    clients: tuple[EvaluationRow, ...]
    headline: str = "accuracy"
    together: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def without_measurements(self) -> "EvaluationRecord":
        """The same without seconds; see `RunResult.without_measurements`."""
        return replace(self, seconds=None, clients=tuple(replace(row, seconds=None) for row in self.clients))

    @property
    def evaluated(self) -> tuple[EvaluationRow, ...]:
        """The clients that evaluated."""
        return tuple(row for row in self.clients if row.status == "evaluated" and row.loss is not None)

    def spread(self, metric: str = "") -> Spread | None:
        """The spread of a metric, by default the headline, over the clients that know it; None if no client does."""
        metric = metric or self.headline
        rows = {row.client_id: (row.device, row.value(metric)) for row in self.evaluated}
        values = {name: value for name, (_, value) in sorted(rows.items()) if value is not None}
        if not values:
            return None
        sign = better(metric)
        figures = list(values.values())
        lower, _, upper = statistics.quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else figures * 3
        worst = min(values, key=lambda name: (sign * values[name], name))
        tiers = {
            tier: statistics.fmean(value for name, value in values.items() if rows[name][0] == tier)
            for tier in sorted({rows[name][0] for name in values})
        }
        worst_tier = min(tiers, key=lambda tier: (sign * tiers[tier], tier))
        return Spread(
            clients=len(values),
            mean=statistics.fmean(figures),
            lower_quartile=lower,
            upper_quartile=upper,
            worst=values[worst],
            worst_client=worst,
            tiers=tiers,
            worst_tier=worst_tier,
            interquartile_range=upper - lower,
            worst_tier_mean=tiers[worst_tier],
        )


def describe_spread(record: EvaluationRecord) -> str:
    """An evaluation in one sentence."""
    spread = record.spread()
    if spread is None:
        return f"after round {record.round} no device has evaluated the model on held-out samples of its own"
    title = METRICS[record.headline].title
    mean = title if title.startswith("mean ") else f"mean {title}"
    return (
        f"after round {record.round} the {mean} on held-out samples of their own is {spread.mean:.4f} over "
        f"{spread.clients} device{'s' * (spread.clients != 1)}, middle half {spread.lower_quartile:.4f} to "
        f"{spread.upper_quartile:.4f}, worst {spread.worst_client} {spread.worst:.4f}, worst tier {spread.worst_tier} "
        f"{spread.worst_tier_mean:.4f}"
    )
