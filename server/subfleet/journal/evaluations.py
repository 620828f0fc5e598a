"""What devices found on data of their own that the model was not trained on: a row each, and how it spreads."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from subfleet.protocol.task_kinds import METRICS, better

_QUARTERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One client in an evaluation.

    Attributes:
        device: its device profile's name, which is its tier.
        architecture: display name of the submodel that it would be given.
        architecture_id: identity of that.
        loss: as the client found it; None where it found none.
        accuracy: the same; None where accuracy means nothing, too.
        sample_count: of its held-out data, 0 where it found nothing, as are all numbers after it.
        label_count: labels that counted.
        class_counts: of these, those of each class, where that was asked.
        class_correct: of these, those that were predicted rightly.
        bytes_down: payload bytes published to it in the meantime.
        bytes_up: payload bytes received from it.
        seconds: from the task's arrival on the device to its answer; None where nobody has measured them.
        status: "evaluated", or why it was not, such as "missing: no answer came in time".
        network: id of the network that the submodel is of; empty for the one that the run began with.
        metrics: further ones of the run's kind of task, which follow from what the client has told.
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
        """A metric, or the loss; None where it is not known."""
        found = {"accuracy": self.accuracy, "loss": self.loss, **self.metrics}
        return found.get(metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a figure spreads over clients, each counted once.

    Quartiles are interpolated between the sorted values, the smallest of which is the quantile 0 and the largest 1, as
    most software does (Hyndman and Fan's seventh definition); of one client all are its own value.

    Attributes:
        clients: how many there are, 1 or more.
        lower_quartile: of their values; a quarter of them lies below.
        upper_quartile: a quarter of them lies above.
        worst: the least favourable value, and whose it is: of equals the first by name.
        tiers: mean by tier, in the order of their names.
        worst_tier: the tier with the least favourable mean.
    """

    clients: int
    mean: float
    lower_quartile: float
    upper_quartile: float
    worst: float
    worst_client: str
    tiers: Mapping[str, float]
    worst_tier: str

    @property
    def interquartile_range(self) -> float:
        """How far the middle half of the clients is apart."""
        return self.upper_quartile - self.lower_quartile

    @property
    def worst_tier_mean(self) -> float:
        """Of the worst tier."""
        return self.tiers[self.worst_tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The evaluation after a round, with a row for each client that was asked; seconds as in `RoundRecord`.

    Attributes:
        headline: the metric that models are judged by.
        together: metrics of all samples of those that have answered, as if they were one data set.
    """

    round: int
    seconds: float | None
    clients: tuple[EvaluationRow, ...]
    headline: str = "accuracy"
    together: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def unmeasured(self) -> "EvaluationRecord":
        """The same without seconds; see `RunResult.unmeasured`."""
        return replace(self, seconds=None, clients=tuple(replace(row, seconds=None) for row in self.clients))

    @property
    def evaluated(self) -> tuple[EvaluationRow, ...]:
        """The clients that have answered."""
        return tuple(row for row in self.clients if row.status == "evaluated" and row.loss is not None)

    def spread(self, metric: str = "") -> Spread | None:
        """How a metric, by default the headline, or the loss spreads over the clients that know it; None for nobody."""
        metric = metric or self.headline
        known = ((row, row.value(metric)) for row in self.evaluated)
        values = {row.client_id: value for row, value in known if value is not None}
        rows = [row for row in self.evaluated if row.client_id in values]
        if not rows:
            return None
        sign = better(metric)
        lower, upper = _compute_quartiles(values.values())
        worst = min(values, key=lambda name: (sign * values[name], name))
        by_tier: dict[str, list[float]] = {}
        for row in sorted(rows, key=lambda one: (one.device, one.client_id)):
            by_tier.setdefault(row.device, []).append(values[row.client_id])
        tiers = {tier: statistics.fmean(found) for tier, found in by_tier.items()}
        return Spread(
            clients=len(rows),
            mean=statistics.fmean(values[name] for name in sorted(values)),
            lower_quartile=lower,
            upper_quartile=upper,
            worst=values[worst],
            worst_client=worst,
            tiers=tiers,
            worst_tier=min(tiers, key=lambda tier: (sign * tiers[tier], tier)),
        )


def _compute_quartiles(values: Iterable[float]) -> tuple[float, float]:
    found = sorted(values)
    if len(found) == 1:
        return found[0], found[0]
    lower, _, upper = statistics.quantiles(found, n=_QUARTERS, method="inclusive")
    return lower, upper


def describe_spread(record: EvaluationRecord) -> str:
    """An evaluation in a sentence."""
    found = record.spread()
    if found is None:
        return f"after round {record.round} no device has evaluated the model on held-out samples of its own"
    title = METRICS[record.headline].title
    mean = title if title.startswith("mean ") else f"mean {title}"
    return (
        f"after round {record.round} the {mean} on held-out samples of their own is {found.mean:.4f} over "
        f"{found.clients} device{'s' * (found.clients != 1)}, middle half {found.lower_quartile:.4f} to "
        f"{found.upper_quartile:.4f}, worst {found.worst_client} {found.worst:.4f}, worst tier {found.worst_tier} "
        f"{found.worst_tier_mean:.4f}"
    )
