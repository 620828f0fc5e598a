"""Oort: selects the clients with the best utility per second.

Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021, sections 4.2 to 4.4 and
algorithm 1. What the paper leaves open is a parameter, with the value of its authors' public code.

Client half: train the given model; report the mean of the squares of the samples' losses.
Server half: a client's statistical utility is its samples times the root of that mean. High utilities are cut at a
quantile, and at three standard deviations above the median, because a quantile of few clients is their largest value. A
client that was selected for its utility too often rests while there are others, so that no claim selects a client
forever (section 4.4 removes it after a number of rounds). The utility, scaled to 0 to 1, gets a bonus that grows with
the rounds since the client's last update. A client that takes longer than the preferred duration T is penalised by
(T / its duration) to a power. A fraction of the round explores clients that were never aggregated, fast ones with
higher probability; the fraction falls from round to round. An explored client that did not answer waits for ten rounds
while there are others, so that silence does not keep it in exploration. The preferred duration is a percentile of the
known ones, which the pacer raises when the utility of the selected clients stops growing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from subfleet.methods.claims import PastSelection, add_selection, bound_claims, find_overselected
from subfleet.methods.describing import MethodInfo, always, parameter
from subfleet.methods.roles import ClosedRound, LocalTraining, Memory, Roles, change_objective
from subfleet.methods.selector import (
    AvailableClient,
    LastUpdate,
    Selection,
    SelectionContext,
    Selector,
    draw_without_replacement,
)
from subfleet.methods.sizes import NESTED, Homogeneous, assign_homogeneous
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Amount, Fraction, Positive, PositiveFraction

Durations = Literal["measured", "expected"]
"""A client's duration in a round: "measured", from sending its last task until its update was stored, by the server's
clock; or "expected", from cost estimates and the speed and link that it reports now, which is the same for the same
seed and logs."""

EXPECTED = "durations are expected from cost estimates and logs, not measured"
"""The departure from papers that measure durations, which all do."""

_RESTING = 1e-9
"""Factor on the score of a resting client, so that it comes after all others."""
_STALENESS = 0.1
"""Of the bonus for clients without a recent update: section 4.2, equation 2."""
_WAITING_ROUNDS = 10
"""Rounds in which an explored client without an update comes after all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OortMemory:
    """The memory of Oort.

    Attributes:
        percentile: of the known durations, the preferred one; from 1 to 100.
        exploiting: the clients of the open round that were selected for their utility.
        choices: the same for the last rounds.
        utilities: the sum of these clients' utilities for each of the last rounds, the newest last.
        explorations: by explored client without an update since, the last round that explored it.
    """

    percentile: float
    exploiting: tuple[str, ...] = ()
    choices: tuple[PastSelection, ...] = ()
    utilities: tuple[float, ...] = ()
    explorations: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Oort:
    """Parameters of Oort. Those without a section have the value of the authors' code.

    Attributes:
        exploration: fraction of the first round that explores, from 0 to 1 (section 4.3), as are the next two.
        exploration_decay: factor on that fraction from each round to the next, above 0 and at most 1.
        least_exploration: the least value of that fraction.
        cutoff: clients are drawn from those with at least this fraction of the score of the last client that would be
            selected by rank, above 0 and at most 1 (section 4.3: 95 %). The authors' later code has 0.05, with which
            nearly all are drawn from.
        clip: quantile at which utilities are cut, above 0 and at most 1 (section 4.3: 95 %; the later code has 0.9).
        penalty: power of the penalty on slow clients, 0 or more; 0 ignores speed (section 4.2).
        percentile: of the known durations, the preferred one at first, above 0 and at most 100.
        pacer_rounds: rounds of a window; the pacer compares the last two windows, 1 or more (section 4.2: W = 20).
        pacer_step: by how much it raises or lowers the percentile.
        flat: the pacer raises the percentile if the utility changed by at most this fraction from window to window;
            the paper raises it if the utility falls, which noise alone can cause.
        steep: it lowers the percentile if the utility changed by at least this factor.
        most_often: how often a client is selected for its utility at most, as a multiple of taking turns; 0 is no
            limit.
        durations: see `Durations`.
        model: which models are trained.
    """

    TYPE: ClassVar[str] = "oort"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Oort",
        paper="Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, OSDI 2021",
        departures={
            "utilities are also cut at three standard deviations above the median": always,
            "an explored client that does not answer waits ten rounds": always,
        },
    )
    exploration: Fraction = 0.9
    exploration_decay: PositiveFraction = 0.98
    least_exploration: Fraction = 0.3
    cutoff: PositiveFraction = parameter(0.95)
    clip: PositiveFraction = parameter(0.95)
    penalty: Amount = parameter(2.0)
    percentile: Annotated[float, Range(above=0, most=100)] = 30.0
    pacer_rounds: Positive = parameter(20)
    pacer_step: Amount = 5.0
    flat: Amount = parameter(
        0.1,
        paper="where the utility falls",
        otherwise="the pacer raises its percentile when utility stagnates, as in the authors' code",
    )
    steep: Amount = 5.0
    most_often: Amount = parameter(
        1.5,
        paper="a number of rounds, after which it is removed",
        otherwise="clients selected too often pause instead of being removed",
    )
    durations: Durations = parameter("measured", otherwise=EXPECTED)
    model: Homogeneous = parameter("largest", otherwise=NESTED)

    def roles(self) -> Roles:
        """FedAvg of the clients with the highest scores, which report the squares of their losses."""
        return Roles(
            selector=Selector(select=self.select),
            memory=Memory(initial=OortMemory(percentile=self.percentile), remember=self.remember),
            assigner=assign_homogeneous(self.model),
            training=LocalTraining(for_round=lambda settings, round_number: change_objective(settings, squares=True)),
        )

    def select(self, context: SelectionContext) -> Selection:
        """Select the clients of a round: those with the highest scores, and some unknown ones."""
        memory: OortMemory = context.memory
        known = [client for client in context.clients if client.past is not None]
        new = {client.client_id: client for client in context.clients if client.past is None}
        waiting = {name: last for name, last in memory.explorations.items() if context.round - last <= _WAITING_ROUNDS}
        count = min(context.count or len(context.clients), len(context.clients))
        fraction = max(self.least_exploration, self.exploration * self.exploration_decay ** (context.round - 1))
        exploring = max(min(round(fraction * count), len(new.keys() - waiting)), count - len(known))
        scores = self.score(known, context.round, memory)
        resting = find_overselected(context, memory.choices, count, self.most_often)
        scores = {name: score * (_RESTING if name in resting else 1.0) for name, score in scores.items()}
        exploiting = self._exploit(scores, count - exploring, context)
        # A client that does not report its speed counts as one of the usual speed.
        durations = [seconds for client in new.values() if (seconds := client.expected_s) > 0]
        usual_s = math.fsum(durations) / len(durations) if durations else 1.0
        speeds = {name: 1 / (client.expected_s or usual_s) for name, client in new.items()}
        drawn = draw_without_replacement(speeds, len(speeds), context.stream("exploration"))
        explored = sorted(drawn, key=lambda name: name in waiting)[:exploring]
        memory = replace(
            memory,
            exploiting=exploiting,
            choices=add_selection(memory.choices, context.round, exploiting),
            explorations=waiting | dict.fromkeys(explored, context.round),
        )
        return Selection(clients=(*exploiting, *explored), memory=memory)

    def score(self, known: Sequence[AvailableClient], round_number: int, memory: OortMemory) -> dict[str, float]:
        """The scores of clients with an update: 0 or more."""
        if not known:
            return {}
        pasts = {client.client_id: client.past for client in known if client.past is not None}
        utilities = {name: _find_utility(past) for name, past in pasts.items()}
        ordered = sorted(utilities.values())
        least, quantile = ordered[0], ordered[min(int(self.clip * len(ordered)), len(ordered) - 1)]
        most = min(quantile, bound_claims(ordered))
        preferred_s = self.compute_preferred_s(known, memory)
        scores = {}
        for client in known:
            # If all have the same utility, all have the best.
            scaled = (min(utilities[client.client_id], most) - least) / (most - least) if most > least else 1.0
            rounds = max(pasts[client.client_id].round, 1)
            score = scaled + math.sqrt(_STALENESS * math.log(max(round_number, 1)) / rounds)
            seconds = duration_s(client, self.durations)
            if seconds > preferred_s:
                score *= (preferred_s / seconds) ** self.penalty
            scores[client.client_id] = score
        return scores

    def compute_preferred_s(self, known: Sequence[AvailableClient], memory: OortMemory) -> float:
        """T: the percentile of the known clients' durations; no limit at 100."""
        if memory.percentile >= 100:
            return math.inf
        ordered = sorted(duration_s(client, self.durations) for client in known)
        return ordered[min(int(len(ordered) * memory.percentile / 100), len(ordered) - 1)]

    def _exploit(self, scores: Mapping[str, float], count: int, context: SelectionContext) -> tuple[str, ...]:
        """Draw clients in proportion to their scores, from those close to the best."""
        if count <= 0:
            return ()
        best = sorted(scores.values(), reverse=True)
        close = {name: score for name, score in scores.items() if score >= self.cutoff * best[count - 1]}
        return draw_without_replacement(close, count, context.stream("exploitation"))

    def remember(self, memory: OortMemory, closed: ClosedRound) -> OortMemory:
        """The pacer: adapt the preferred duration to whether longer rounds bring more utility."""
        utility = math.fsum(_find_utility(closed.clients[name]) for name in memory.exploiting if name in closed.clients)
        window = self.pacer_rounds
        utilities = (*memory.utilities, utility)[-2 * window :]
        percentile = memory.percentile
        if closed.round % window == 0 and len(utilities) == 2 * window:
            before, now = math.fsum(utilities[:window]), math.fsum(utilities[window:])
            change = abs(now - before)
            if change <= self.flat * before:
                percentile = min(100.0, percentile + self.pacer_step)
            elif change >= self.steep * before:
                percentile = max(self.pacer_step, percentile - self.pacer_step)
        silent = {name: last for name, last in memory.explorations.items() if name not in closed.clients}
        return OortMemory(percentile=percentile, utilities=utilities, choices=memory.choices, explorations=silent)


def duration_s(client: AvailableClient, durations: Durations) -> float:
    """A client's duration in a round; expected if it was not measured."""
    if durations == "expected" or client.past is None or client.past.took_s <= 0:
        return client.expected_s
    return client.past.took_s


def _find_utility(past: LastUpdate) -> float:
    """Section 4.2, equation 1: |B| sqrt(1/|B| sum of squared losses)."""
    return past.sample_count * math.sqrt(past.square_loss)
