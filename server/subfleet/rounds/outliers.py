"""Outlier detection: updates that are far from the others, and suspects of a diverged round. Pure.

How far an update moves the model is measured when the update is stored, so that a round is judged before it is
aggregated. If only the aggregated model shows a problem, a loss far above the last one, the updates with the most
unusual changes are suspect.

Longer training moves a model further. With equal gradients, a change would grow as `travel` does; since gradients
shrink and turn while a client learns, an honest change stays below `change_factor` times a power of that. If most
clients have hardly anything left to learn from few samples, the median says nothing about a client with many more
samples: its change is no outlier while it is smaller than the weights that it changes. The same holds for all clients
if there are too few updates for a median. Otherwise a change below a fifth of these weights is no outlier, since honest
changes vary.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median_low
from types import MappingProxyType

from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.sections import OutlierSettings

COMPARED = 4
"""Least number of updates that are compared with their own median; fewer are compared with earlier rounds."""
_GROWTH = 0.6
"""Power of the travel by which longer training explains a larger change."""
MUCH_LONGER = 5.0
"""Multiple of the usual samples or steps above which the median says nothing about a client."""
HELD_FRACTION = 0.2
"""Fraction of the changed weights below which a change is no outlier: honest changes of equal training were observed
at 0.19 and 16 times the median."""
MOST_GROWTH = 100.0
"""Most times the usual change that training explains, however many samples a client claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSize:
    """How far an update moves the trained tensors: root mean squares over elements, 0 if there are none of a kind.

    Attributes:
        weights: for the changes of shared weights.
        statistics: for the changes of shared running statistics, which may differ from weights in magnitude.
        measured: for the inputs of norms, in a calibration.
        own: for the changes of the client's own weights and statistics in a personalised model; these are not compared.
        travel: how far its training would have moved a weight along gradients of 1, see `travel`; 0 is unknown.
        held_weights: for the weights themselves, as the client received them; 0 is unknown.
        held_statistics: for the running statistics, as the client received them.
        samples: the samples that it counts as trained on; 0 is unknown.
    """

    weights: float = 0.0
    statistics: float = 0.0
    measured: float = 0.0
    own: float = 0.0
    travel: float = field(default=0.0, metadata=ADDED_LATER)
    held_weights: float = field(default=0.0, metadata=ADDED_LATER)
    held_statistics: float = field(default=0.0, metadata=ADDED_LATER)
    samples: float = field(default=0.0, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """An update that is far from the others.

    Attributes:
        scale: factor of the update and its weight, above 0 and below 1: the limit over its change, to the fourth power.
            So an update just above the limit counts nearly in full, and one far above it hardly moves the model.
        why: the reason in a few words.
    """

    scale: float
    why: str


_COMPARED_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "its change of weights",
        "statistics": "its change of running statistics",
        "measured": "what it measured",
    }
)
_FALL = 4
"""Power of the limit over the change by which an outlier counts less."""
_LEAST_SCALE = 2.0**-100
"""The smallest scale, so that it never becomes 0."""


def travel(training: TrainingSettings, sample_count: int) -> float:
    """How far local training would move a weight with a gradient of 1 in every step.

    With a rate r and a momentum m the k-th step of plain SGD moves it by r (1 - m^k) / (1 - m); a step of Adam by r.

    Args:
        training: the training settings of the client's task.
        sample_count: samples of one pass, 0 or more.
    """
    steps = training.step_count(sample_count)
    momentum = training.optimiser.momentum if training.optimiser.name == "sgd" else 0.0
    lasting = steps - momentum * (1 - momentum**steps) / (1 - momentum)
    return training.learning_rate * lasting / (1 - momentum)


def find_outliers(
    sizes: Mapping[str, ChangeSize], past: Sequence[ChangeSize], settings: OutlierSettings
) -> dict[str, Outlier]:
    """The clients of a round with changes far above what is usual and what their training explains.

    Args:
        sizes: the change sizes of the round's updates, by client.
        past: the usual change of each of the last accepted rounds.
        settings: the run's settings.
    """
    result: dict[str, Outlier] = {}
    for kind, words in _COMPARED_KINDS.items():
        usual, source, of_round = _find_usual(kind, sizes, past)
        for name, size in sizes.items():
            change, most = getattr(size, kind), settings.change_factor * _compute_expected(kind, size, usual)
            share = HELD_FRACTION if of_round and not _trains_much_longer(size, usual) else 1.0
            most = max(most, share * getattr(size, f"held_{kind}", 0.0)) if most else math.inf
            if change > most and (scale := max((most / change) ** _FALL, _LEAST_SCALE)) < _get_scale(result.get(name)):
                times, at_most = (value / getattr(usual, kind) for value in (change, most))
                why = f"{words} is {times:.3g} times {source}; the limit is {at_most:.3g} times"
                result[name] = Outlier(scale=scale, why=why)
    return result


def compute_usual_change(sizes: Iterable[ChangeSize]) -> ChangeSize:
    """The medians of a round's changes; of an even number of values, the lower of the middle two."""
    known = tuple(sizes)
    return ChangeSize(
        **{kind.name: _compute_median(getattr(size, kind.name) for size in known) for kind in fields(ChangeSize)}
    )


def rank_outliers(sizes: Mapping[str, ChangeSize]) -> tuple[str, ...]:
    """The clients of a diverged round, by how unusual their changes are, of any kind; the most unusual first."""
    usual = compute_usual_change(sizes.values())

    def stands_out(name: str) -> float:
        size, ratios = sizes[name], [0.0]
        for kind in (*_COMPARED_KINDS, "own"):
            if value := getattr(size, kind):
                expected = _compute_expected(kind, size, usual)
                ratios.append(value / expected if expected else math.inf)
        return max(ratios)

    return tuple(sorted(sizes, key=lambda name: (-stands_out(name), name)))


def explain_divergence(
    loss: float | None, last_loss: float | None, guess_loss: float, settings: OutlierSettings
) -> str:
    """Why an aggregated model has diverged; empty if it has not.

    Args:
        loss: the loss of its evaluation; None if it was not evaluated.
        last_loss: the loss of the last accepted round; None before there is one.
        guess_loss: the loss of guessing without the inputs.
        settings: the run's settings; if no update may be left out, every finite loss is accepted.
    """
    if loss is None:
        return ""
    if not math.isfinite(loss):
        return f"the model diverged to a loss of {loss}"
    limited = settings.alters and settings.loss_factor > 0
    if limited and loss > settings.loss_factor * max(guess_loss, last_loss or 0.0):
        before = f"{guess_loss:.3g} of a guess" if last_loss is None else f"{last_loss:.3g} in the round before"
        return f"the model diverged to a loss of {loss:.3g}, after {before}"
    return ""


def _find_usual(kind: str, sizes: Mapping[str, ChangeSize], past: Sequence[ChangeSize]) -> tuple[ChangeSize, str, bool]:
    """The usual change of a kind, its name, and whether it is of the round itself; 0 if unknown."""
    if len(sizes) >= COMPARED and getattr(usual := compute_usual_change(sizes.values()), kind):
        return usual, "the median of the round", True
    return compute_usual_change(size for size in past if getattr(size, kind)), "that of the last rounds", False


def _trains_much_longer(size: ChangeSize, usual: ChangeSize) -> bool:
    """Whether a client trains on so many more samples than usual that it may still learn when most do not."""
    pairs = ((size.samples, usual.samples), (size.travel, usual.travel))
    return any(own > 0 and own >= MUCH_LONGER * most_have for own, most_have in pairs)


def _compute_expected(kind: str, size: ChangeSize, usual: ChangeSize) -> float:
    """The usual change of a kind, times what a client's longer training explains; a calibration takes no steps."""
    if kind == "measured" or not usual.travel or size.travel <= usual.travel:
        return float(getattr(usual, kind))
    return float(getattr(usual, kind)) * min(math.pow(size.travel / usual.travel, _GROWTH), MOST_GROWTH)


def _get_scale(outlier: Outlier | None) -> float:
    return 1.0 if outlier is None else outlier.scale


def _compute_median(values: Iterable[float]) -> float:
    known = sorted(values)
    return median_low(known) if known else 0.0
