"""Updates that are far from the others, and folds that went wrong: who is suspect. Pure.

How far an update moves the model is measured when it is stored, so that a round is judged before it is folded. What
only shows in the folded model, a loss far above the last one, is laid to those whose change stands out most.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median_low
from types import MappingProxyType

from subfleet.settings.suspicion import SuspicionSettings

__all__ = ["ChangeSize", "divergence", "most_suspect", "outsiders", "usual_change"]

COMPARED = 4
"""Updates of a round that have a median of their own; fewer are compared with the rounds before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSize:
    """How far an update moves what it trained: root mean squares over elements, 0 where there are none of a kind.

    Attributes:
        weights: of the changes of weights that the client does not have to itself.
        statistics: of the changes of such running statistics; they may be of another magnitude than weights.
        measured: of what norms were given, where the client measured them and trained nothing.
        own: of the changes of weights and statistics that it has to itself, as personal methods have them. What it
            learns there is its own affair, so these are not compared.
    """

    weights: float = 0.0
    statistics: float = 0.0
    measured: float = 0.0
    own: float = 0.0


_COMPARED_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "its change of weights",
        "statistics": "its change of running statistics",
        "measured": "what it measured",
    }
)


def outsiders(
    sizes: Mapping[str, ChangeSize], past: Sequence[ChangeSize], settings: SuspicionSettings
) -> dict[str, str]:
    """The clients of a round whose change is far outside what is usual, and why.

    Args:
        sizes: of the round's updates, by client.
        past: the usual change of each of the last accepted rounds.
        settings: of the run.
    """
    found: dict[str, str] = {}
    for kind, words in _COMPARED_KINDS.items():
        of_round = _median(getattr(size, kind) for size in sizes.values()) if len(sizes) >= COMPARED else 0.0
        usual = of_round or _median(one for size in past if (one := getattr(size, kind)) > 0)
        whose = "the median of the round" if of_round else "that of the last rounds"
        for name, size in sizes.items():
            if settings.change_factor and usual and getattr(size, kind) > settings.change_factor * usual:
                times = getattr(size, kind) / usual
                why = f"{words} is {times:.3g} times {whose}, but may be {settings.change_factor:g} times at most"
                found.setdefault(name, why)
    return found


def usual_change(sizes: Iterable[ChangeSize]) -> ChangeSize:
    """The medians of a round's changes; of an even number of values the lower of the middle two."""
    known = tuple(sizes)
    return ChangeSize(**{one.name: _median(getattr(size, one.name) for size in known) for one in fields(ChangeSize)})


def most_suspect(sizes: Mapping[str, ChangeSize]) -> tuple[str, ...]:
    """The clients of a round that went wrong, those first whose change stands out most, of whichever kind."""
    usual = usual_change(sizes.values())

    def stands_out(name: str) -> float:
        pairs = ((getattr(sizes[name], one.name), getattr(usual, one.name)) for one in fields(ChangeSize))
        return max((value / median if median else math.inf for value, median in pairs if value), default=0.0)

    return tuple(sorted(sizes, key=lambda name: (-stands_out(name), name)))


def divergence(loss: float, last_loss: float | None, class_count: int, settings: SuspicionSettings) -> str:
    """Why a folded model has diverged; empty where it has not.

    Args:
        loss: of its evaluation: mean cross-entropy, in nats.
        last_loss: of the last accepted round; None before there is one.
        class_count: of the network.
        settings: of the run.
    """
    if not math.isfinite(loss):
        return f"the model diverged to a loss of {loss}"
    guessing = math.log(class_count)
    if settings.loss_factor and loss > settings.loss_factor * max(guessing, last_loss or 0.0):
        before = f"{guessing:.3g} of a guess" if last_loss is None else f"{last_loss:.3g} in the round before"
        return f"the model diverged to a loss of {loss:.3g}, after {before}"
    return ""


def _median(values: Iterable[float]) -> float:
    known = sorted(values)
    return median_low(known) if known else 0.0
