"""Updates that are far from the others, and rounds that went wrong: who is suspect. Pure.

How far an update moves the model is measured when it is stored, so that a round is judged before it is aggregated. What
only shows in the aggregated model, a loss far above the last one, is laid to those whose change stands out most.

Longer training moves a model further. Where all gradients were alike, a change would grow as `travel` does; as they
shrink and turn while a client learns, an honest change stays below `change_factor` times a power of that. And
where most clients have hardly anything left to learn from their few samples, the median says nothing of a client with
much more of them: its change is not far while it is smaller than what it changes. Where too few updates came to have a
median of their own, that holds for all. Else, as honest changes jump, one is not far below a fifth of what it changes.
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
"""Updates of a round that have a median of their own; fewer are compared with the rounds before."""
_GROWTH = 0.6
"""Power of the distance by which longer training explains a larger change."""
MUCH_LONGER = 5.0
"""Of a client that trains on so many times the usual samples or steps, the median says nothing."""
HELD_FRACTION = 0.2
"""Of what it changes, below which a change is not far, whatever is usual: honest ones of equal training were seen at
0.19 and 16 times the median."""
MOST_GROWTH = 100.0
"""However many samples a client claims, its training explains no more than so many times the usual change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSize:
    """How far an update moves what it trained: root mean squares over elements, 0 where there are none of a kind.

    Attributes:
        weights: of the changes of weights that the client does not have to itself.
        statistics: of the changes of such running statistics; they may be of another magnitude than weights.
        measured: of what norms were given, where the client measured them and trained nothing.
        own: of the changes of weights and statistics that it has to itself, as personal methods have them. What it
            learns there is its own affair, so these are not compared.
        travel: how far its training would have moved a weight along gradients of 1, see `travel`; 0 is unknown.
        held_weights: the weights themselves, as the client received them; 0 is unknown.
        held_statistics: the running statistics.
        samples: that it counts as trained on; 0 is unknown.
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
        scale: what it and its weight are multiplied by, above 0 and below 1: the largest change that is not far over
            its own, to the fourth power. So what is a little too large counts nearly in full, and the further off an
            update is, the less it moves the model.
        why: in a few words.
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
"""Power of the limit over the change by which an update that is far counts less."""
_LEAST_SCALE = 2.0**-100
"""A scale stays a number whatever comes; less would be no different."""


def travel(training: TrainingSettings, sample_count: int) -> float:
    """How far local training would move a weight whose gradient is 1 in every step, however the steps are made.

    With a rate r and a momentum m the k-th step of plain SGD moves it by r (1 - m^k) / (1 - m); a step of Adam by r.

    Args:
        training: of the client's task.
        sample_count: samples that a pass goes over, 0 or more.
    """
    steps = training.step_count(sample_count)
    momentum = training.optimiser.momentum if training.optimiser.name == "sgd" else 0.0
    lasting = steps - momentum * (1 - momentum**steps) / (1 - momentum)
    return training.learning_rate * lasting / (1 - momentum)


def find_outliers(
    sizes: Mapping[str, ChangeSize], past: Sequence[ChangeSize], settings: OutlierSettings
) -> dict[str, Outlier]:
    """The clients of a round whose change is far outside what is usual and what their training explains.

    Args:
        sizes: of the round's updates, by client.
        past: the usual change of each of the last accepted rounds.
        settings: of the run.
    """
    found: dict[str, Outlier] = {}
    for kind, words in _COMPARED_KINDS.items():
        usual, whose, of_round = _find_usual(kind, sizes, past)
        for name, size in sizes.items():
            change, most = getattr(size, kind), settings.change_factor * _compute_expected(kind, size, usual)
            share = HELD_FRACTION if of_round and not _trains_much_longer(size, usual) else 1.0
            most = max(most, share * getattr(size, f"held_{kind}", 0.0)) if most else math.inf
            if change > most and (scale := max((most / change) ** _FALL, _LEAST_SCALE)) < _get_scale(found.get(name)):
                times, at_most = (value / getattr(usual, kind) for value in (change, most))
                why = f"{words} is {times:.3g} times {whose}, but may be {at_most:.3g} times at most"
                found[name] = Outlier(scale=scale, why=why)
    return found


def compute_usual_change(sizes: Iterable[ChangeSize]) -> ChangeSize:
    """The medians of a round's changes; of an even number of values the lower of the middle two."""
    known = tuple(sizes)
    return ChangeSize(
        **{one.name: _compute_median(getattr(size, one.name) for size in known) for one in fields(ChangeSize)}
    )


def rank_outliers(sizes: Mapping[str, ChangeSize]) -> tuple[str, ...]:
    """The clients of a round that went wrong, those first whose change stands out most, of whichever kind."""
    usual = compute_usual_change(sizes.values())

    def stands_out(name: str) -> float:
        size, found = sizes[name], [0.0]
        for kind in (*_COMPARED_KINDS, "own"):
            if value := getattr(size, kind):
                expected = _compute_expected(kind, size, usual)
                found.append(value / expected if expected else math.inf)
        return max(found)

    return tuple(sorted(sizes, key=lambda name: (-stands_out(name), name)))


def explain_divergence(loss: float, last_loss: float | None, guess_loss: float, settings: OutlierSettings) -> str:
    """Why an aggregated model has diverged; empty where it has not.

    Args:
        loss: of its evaluation.
        last_loss: of the last accepted round; None before there is one.
        guess_loss: that of knowing nothing of the inputs.
        settings: of the run; where nobody is left out, a model of a finite loss goes on as it is.
    """
    if not math.isfinite(loss):
        return f"the model diverged to a loss of {loss}"
    limited = settings.alters and settings.loss_factor > 0
    if limited and loss > settings.loss_factor * max(guess_loss, last_loss or 0.0):
        before = f"{guess_loss:.3g} of a guess" if last_loss is None else f"{last_loss:.3g} in the round before"
        return f"the model diverged to a loss of {loss:.3g}, after {before}"
    return ""


def _find_usual(kind: str, sizes: Mapping[str, ChangeSize], past: Sequence[ChangeSize]) -> tuple[ChangeSize, str, bool]:
    """The usual change of a kind, whose it is, and whether of the round itself; 0 where nothing is known of it."""
    if len(sizes) >= COMPARED and getattr(usual := compute_usual_change(sizes.values()), kind):
        return usual, "the median of the round", True
    return compute_usual_change(one for one in past if getattr(one, kind)), "that of the last rounds", False


def _trains_much_longer(size: ChangeSize, usual: ChangeSize) -> bool:
    """Whether a client trains on so much more than is usual that it may still learn where most do not."""
    pairs = ((size.samples, usual.samples), (size.travel, usual.travel))
    return any(own > 0 and own >= MUCH_LONGER * most_have for own, most_have in pairs)


def _compute_expected(kind: str, size: ChangeSize, usual: ChangeSize) -> float:
    """The usual change of a kind, times what a client's longer training explains. Measuring takes no steps."""
    if kind == "measured" or not usual.travel or size.travel <= usual.travel:
        return float(getattr(usual, kind))
    return float(getattr(usual, kind)) * min(math.pow(size.travel / usual.travel, _GROWTH), MOST_GROWTH)


def _get_scale(outlier: Outlier | None) -> float:
    return 1.0 if outlier is None else outlier.scale


def _compute_median(values: Iterable[float]) -> float:
    known = sorted(values)
    return median_low(known) if known else 0.0
