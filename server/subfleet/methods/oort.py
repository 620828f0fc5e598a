"""Oort: selects the clients with the best utility per second.

Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021, sections 4.2 to 4.4 and
algorithm 1. Where the paper leaves something open, what its authors' public code does is a parameter.

Client half: train the given model; tell the mean of the squares of the samples' losses.
Server half: a client's statistical utility is its samples times the root of that mean. High ones are cut at a quantile,
and at three standard deviations above the median, as a quantile of few clients is the largest of them. Who was chosen
by its utility too often rests while there are others, so that no client is chosen for ever by what it claims (section
4.4 removes it for good after a number of rounds). To the utility, scaled to 0 to 1, comes a bonus that grows with the
rounds since the client was last heard. Who takes longer than the preferred duration T is held back by (T / its
duration) to a power. A fraction of the round explores clients that were never aggregated, the fast ones rather; the
share falls from round to round. Who was explored and told nothing waits for ten rounds while there are others, so that
no client is explored for ever by its silence. The preferred duration is a percentile of the known ones, and the pacer
raises it when what the chosen clients are worth no longer grows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from subfleet.methods.describing import MethodInfo, Published, Setting
from subfleet.methods.local_training import LocalTraining
from subfleet.methods.roles import ClosedRound, Memory, Roles
from subfleet.methods.selector import (
    AvailableClient,
    LastUpdate,
    Selection,
    SelectionContext,
    Selector,
    without_replacement,
)
from subfleet.methods.sizes import ONE_MODEL, Homogeneous, one_model
from subfleet.methods.turns import Choice, had_their_share, most_believed, with_choice
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Amount, Fraction, Positive, PositiveFraction
from subfleet.protocol.training import TrainingSettings

__all__ = ["Durations", "Oort", "OortMemory", "duration_s", "with_squares"]

Durations = Literal["measured", "expected"]
"""How long a round takes a client: "measured", from the sending of its last task until its update was stored, by the
server's clock; or "expected", by cost estimates and what it tells of its speed and link now, which is the same for the
same seed and logs."""

MEASURED = Published(value="measured", told="durations are expected from cost estimates and logs, not measured")
"""Of `Durations`, in papers that measure them."""

_BEHIND = 1e-9
"""Times its score, whoever rests comes behind all others."""
_STALENESS = 0.1
"""Of the bonus for clients not heard of for long: section 4.2, equation 2."""
_WAITING_ROUNDS = 10
"""For which whoever was explored and is still unknown comes behind all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OortMemory:
    """What Oort remembers.

    Attributes:
        percentile: of the known durations, which is the preferred one; from 1 to 100.
        exploiting: the clients of the open round that were chosen for their utility.
        choices: the same of the last rounds.
        utilities: what such clients were worth in the last rounds, the newest last: the sum over each round's updates.
        tried: of clients that were explored and not aggregated since, the last round in which they were.
    """

    percentile: float
    exploiting: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    utilities: tuple[float, ...] = ()
    tried: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Oort:
    """Parameters of Oort. Those without a section are what the authors' code takes where the paper says nothing.

    Attributes:
        exploration: fraction of the first round that explores, from 0 to 1 (section 4.3), as are the next two.
        exploration_decay: factor on that share from each round to the next, above 0 and at most 1.
        least_exploration: the share falls no lower.
        cutoff: fraction of the score of the last client that would be chosen from which on clients are drawn, above 0
            and at most 1 (section 4.3: 95 %). The authors' later code has 0.05, with which nearly all are drawn from.
        clip: quantile at which utilities are cut, above 0 and at most 1 (section 4.3: 95 %; the later code has 0.9).
        penalty: power of the penalty on slow clients, 0 or more; 0 ignores speed (section 4.2).
        percentile: of the known durations that is preferred at first, above 0 and at most 100.
        pacer_rounds: rounds of a window, of which the pacer compares the last two, 1 or more (section 4.2: W = 20).
        pacer_step: by which it raises the percentile, or lowers it.
        flat: the pacer raises the percentile where the utility changed by less than this share from window to window;
            the paper raises it where the utility falls, which noise alone makes it do.
        steep: and lowers it where it changed by more than this many times.
        most_often: how many times as often as if all took turns a client is chosen for its utility at most; 0 is no
            limit.
        durations: see `Durations`.
        model: which models are trained.
    """

    TYPE: ClassVar[str] = "oort"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Oort",
        paper="Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, OSDI 2021",
        varies=(),
        published={
            "exploration": None,
            "exploration_decay": None,
            "least_exploration": None,
            "cutoff": Published(value=0.95),
            "clip": Published(value=0.95),
            "penalty": Published(value=2.0),
            "percentile": None,
            "pacer_rounds": Published(value=20),
            "pacer_step": None,
            "flat": Published(
                value="where the utility falls",
                told="the pacer raises its percentile when utility stagnates, as in the authors' code",
            ),
            "steep": None,
            "most_often": Published(
                value="a number of rounds, after which it is removed",
                told="clients selected too often pause instead of being removed",
            ),
            "durations": MEASURED,
            "model": ONE_MODEL,
        },
    )
    exploration: Fraction = 0.9
    exploration_decay: PositiveFraction = 0.98
    least_exploration: Fraction = 0.3
    cutoff: PositiveFraction = 0.95
    clip: PositiveFraction = 0.95
    penalty: Amount = 2.0
    percentile: Annotated[float, Range(above=0, most=100)] = 30.0
    pacer_rounds: Positive = 20
    pacer_step: Amount = 5.0
    flat: Amount = 0.1
    steep: Amount = 5.0
    most_often: Amount = 1.5
    durations: Durations = "measured"
    model: Homogeneous = "largest"

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ()

    def roles(self) -> Roles:
        """FedAvg of those who are worth most."""
        return Roles(
            selector=Selector(select=self.select),
            memory=Memory(initial=OortMemory(percentile=self.percentile), remember=self.remember),
            assigner=one_model(self.model),
            training=LocalTraining(for_round=with_squares),
        )

    def select(self, context: SelectionContext) -> Selection:
        """The clients of a round: those worth most, and some that nobody knows."""
        memory: OortMemory = context.memory
        known = [one for one in context.clients if one.past is not None]
        new = {one.client_id: one for one in context.clients if one.past is None}
        tried = {name: last for name, last in memory.tried.items() if context.round - last <= _WAITING_ROUNDS}
        count = min(context.count or len(context.clients), len(context.clients))
        share = max(self.least_exploration, self.exploration * self.exploration_decay ** (context.round - 1))
        exploring = max(min(round(share * count), len(new.keys() - tried)), count - len(known))
        scores = self.scores(known, context.round, memory)
        exploited = self._exploited(self._in_turn(scores, count, context), count - exploring, context)
        # Unknown durations of 0 are those of clients that tell nothing of their pace: they stand in the middle.
        told = [seconds for one in new.values() if (seconds := one.expected_s) > 0]
        usual_s = math.fsum(told) / len(told) if told else 1.0
        speeds = {name: 1 / (one.expected_s or usual_s) for name, one in new.items()}
        drawn = without_replacement(speeds, len(speeds), context.stream("exploration"))
        explored = sorted(drawn, key=lambda name: name in tried)[:exploring]
        memory = replace(
            memory,
            exploiting=exploited,
            choices=with_choice(memory.choices, context.round, exploited),
            tried=tried | dict.fromkeys(explored, context.round),
        )
        return Selection(clients=(*exploited, *explored), memory=memory)

    def scores(self, known: Sequence[AvailableClient], round_number: int, memory: OortMemory) -> Mapping[str, float]:
        """What clients that were aggregated before are worth now: 0 or more."""
        if not known:
            return {}
        utilities = {one.client_id: _utility(_past(one)) for one in known}
        ordered = sorted(utilities.values())
        least, quantile = ordered[0], ordered[min(int(self.clip * len(ordered)), len(ordered) - 1)]
        most = min(quantile, most_believed(ordered))
        preferred_s = self.preferred_s(known, memory)
        found = {}
        for one in known:
            # Where all are worth the same, all are worth most.
            scaled = (min(utilities[one.client_id], most) - least) / (most - least) if most > least else 1.0
            score = scaled + math.sqrt(_STALENESS * math.log(max(round_number, 1)) / max(_past(one).round, 1))
            seconds = duration_s(one, self.durations)
            if seconds > preferred_s:
                score *= (preferred_s / seconds) ** self.penalty
            found[one.client_id] = score
        return found

    def preferred_s(self, known: Sequence[AvailableClient], memory: OortMemory) -> float:
        """T: the percentile of the known clients' durations; no limit at 100."""
        if memory.percentile >= 100:
            return math.inf
        ordered = sorted(duration_s(one, self.durations) for one in known)
        return ordered[min(int(len(ordered) * memory.percentile / 100), len(ordered) - 1)]

    def _in_turn(self, scores: Mapping[str, float], count: int, context: SelectionContext) -> Mapping[str, float]:
        """The scores of those that have not had their share of rounds; of the others behind all of these."""
        had = had_their_share(
            context.memory.choices,
            round_number=context.round,
            wanted=count,
            known=len(context.clients),
            most_often=self.most_often,
        )
        return {name: score * (_BEHIND if name in had else 1.0) for name, score in scores.items()}

    def _exploited(self, scores: Mapping[str, float], count: int, context: SelectionContext) -> tuple[str, ...]:
        """Drawn in proportion to their scores, of those close to the best."""
        if count <= 0:
            return ()
        best = sorted(scores.values(), reverse=True)
        close = {name: score for name, score in scores.items() if score >= self.cutoff * best[count - 1]}
        return without_replacement(close, count, context.stream("exploitation"))

    def remember(self, memory: Any, closed: ClosedRound) -> OortMemory:
        """The pacer: how long clients may take follows from whether longer rounds are worth it."""
        known: OortMemory = memory
        worth = math.fsum(_utility(closed.clients[name]) for name in known.exploiting if name in closed.clients)
        window = self.pacer_rounds
        utilities = (*known.utilities, worth)[-2 * window :]
        percentile = known.percentile
        if closed.round % window == 0 and len(utilities) == 2 * window:
            before, now = math.fsum(utilities[:window]), math.fsum(utilities[window:])
            change = abs(now - before)
            if change <= self.flat * before:
                percentile = min(100.0, percentile + self.pacer_step)
            elif change >= self.steep * before:
                percentile = max(self.pacer_step, percentile - self.pacer_step)
        silent = {name: last for name, last in known.tried.items() if name not in closed.clients}
        return OortMemory(percentile=percentile, utilities=utilities, choices=known.choices, tried=silent)


def duration_s(client: AvailableClient, durations: Durations) -> float:
    """How long a round takes a client; what was not measured is expected."""
    if durations == "expected" or client.past is None or client.past.took_s <= 0:
        return client.expected_s
    return client.past.took_s


def with_squares(settings: TrainingSettings, round_number: int) -> TrainingSettings:
    """The local training whose clients tell the squares of their losses."""
    return replace(settings, objective=replace(settings.objective, squares=True))


def _past(client: AvailableClient) -> LastUpdate:
    if client.past is None:
        raise ValueError(f"client {client.client_id} was never aggregated, so that it has no score")
    return client.past


def _utility(past: LastUpdate) -> float:
    """Section 4.2, equation 1: |B| sqrt(1/|B| sum of squared losses)."""
    return past.sample_count * math.sqrt(past.square_loss)
