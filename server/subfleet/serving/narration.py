"""Describes a run while it goes on: the changes of a step, and its progress."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

from subfleet.elastic.lineage import Lineage
from subfleet.journal.records import Progress
from subfleet.protocol.input_statistics import InputStatistics, find_scale_problem
from subfleet.protocol.messages import Profile
from subfleet.rounds.awaiting import DUTY_TERMS, name_last
from subfleet.rounds.closing import explain_early_end
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import EXTRA_FROM, PUNCTUAL, FleetMember
from subfleet.rounds.networks import find_trainable_attempts
from subfleet.rounds.offers import REMEDY, find_scale_warning
from subfleet.rounds.state import RunState

_SHOWN = 5
"""Number of clients that a sentence names."""


def describe_step(context: RunContext, before: RunState, after: RunState) -> Iterator[str]:
    """Sentences about the changes of a step."""
    yield from _describe_data(context, before, after)
    if after.failed_attempts.lost != before.failed_attempts.lost:
        failed_attempts, pause_s = after.failed_attempts, after.live.attempt_times.pause_s
        pause = f"in {pause_s:g} s" if pause_s else "at once"
        again = "" if after.phase == "failed" else f"; it is attempted again {pause}"
        yield f"round {before.round} left nothing to aggregate ({failed_attempts.waits_for}){again}"
    for name, excluded in after.outliers.excluded.items():
        if before.outliers.excluded.get(name) != excluded:
            yield f"client {name} is {excluded.reason}"
    yield from _describe_outliers(before, after)
    yield from describe_networks(before.lineages, after.lineages)
    yield from describe_readiness(context, before, after)
    if after.aggregated_round != before.aggregated_round and (why := explain_early_end(context, after)):
        yield f"the run ends after round {after.aggregated_round} of {context.config.total_rounds}: {why}"
    if after.phase == "deploy" != before.phase:
        yield "the last round is done; each device's own model is exported and sent"


def _describe_data(context: RunContext, before: RunState, after: RunState) -> Iterator[str]:
    """Sentences about clients that joined or are no longer waited for, and about inputs on another scale."""
    for name in after.live.members.find_changed(before.live.members):
        was, now = before.live.members.get(name, FleetMember()), after.live.members[name]
        yield from (f"client {name} {words}" for words in _describe_waits(was, now))
    changed = [*after.profiles.find_changed(before.profiles)]
    joined = [name for name in changed if name not in before.profiles]
    if len(joined) > _SHOWN:
        yield f"{len(joined)} clients joined"
    for name in changed:
        known, profile = before.profiles.get(name), after.profiles[name]
        if profile == known:
            continue
        if known is None and len(joined) <= _SHOWN:
            runtimes = ", ".join(profile.runtimes)
            yield f"client {name} joined: {profile.device}, {runtimes}, {profile.sample_count} samples"
        if warning := find_scale_warning(context, profile):
            yield f"client {name}: {warning}"
    if after.phase == "train" != before.phase and after.round == 1 and not after.attempt:
        there = after.clients.keys() | set().union(*after.idle.values())
        yield from compare_peers(context, {name: after.profiles[name] for name in there if name in after.profiles})


def _describe_outliers(before: RunState, after: RunState) -> Iterator[str]:
    """Sentences about outliers that are aggregated all the same, when the aggregation begins."""
    if after.phase != "aggregate" or before.phase == "aggregate":
        return
    for name, client in sorted(after.clients.items()):
        if client.stage == "done" and client.outlier:
            treated = "counts as it is" if client.scale == 1 else f"is scaled by {client.scale:.3g}"
            yield f"the update of client {name} in round {after.round} {treated}: {client.outlier}"


def _describe_waits(before: FleetMember, after: FleetMember) -> Iterator[str]:
    """Sentences about a client that the run stops waiting for, or waits for again."""
    if before.punctuality is after.punctuality:
        return
    for duty in DUTY_TERMS:
        was, now = (member.punctuality.get(duty, PUNCTUAL) for member in (before, after))
        if was.missed < EXTRA_FROM <= now.missed:
            missed = name_last(now.missed, duty)
            yield f"has not answered {missed}; the run does not wait for it until it answers again"
        elif was.missed >= EXTRA_FROM and not now.missed:
            yield f"has answered {name_last(1, duty)}, and the run waits for it again"


def describe_networks(before: Iterable[Lineage], after: Iterable[Lineage]) -> Iterator[str]:
    """A sentence for each network that was added or retired."""
    living = {lineage.id: lineage.living for lineage in before}
    for lineage in after:
        if lineage.id and lineage.id not in living:
            parent, reason = lineage.parent, f": {lineage.reason}" if lineage.reason else ""
            origin = "drawn anew" if parent is None else f"{lineage.map.TYPE} from {_name_network(parent)}"
            yield f"network {lineage.id} has appeared, {origin}{reason}"
        if not lineage.living and living.get(lineage.id, True):
            yield f"{_name_network(lineage.id)} has retired"


def describe_readiness(context: RunContext, before: RunState, after: RunState) -> Iterator[str]:
    """A sentence for each network that can be trained from the next attempt on, as its first program is written."""
    if (after.written is before.written and after.run_attempt == before.run_attempt) or not after.lineages:
        return
    ready = _list_trainable(context, after) - _list_trainable(context, before)
    for lineage in after.lineages:
        if lineage.born_round and lineage.living and lineage.id in ready:
            yield f"network {lineage.id} may be trained from the next round on"


def _list_trainable(context: RunContext, state: RunState) -> set[str]:
    """The networks with a program that can be given in the next attempt."""
    attempts = find_trainable_attempts(context, state)
    return {name for name, attempt in attempts.items() if attempt <= state.run_attempt + 1}


def _name_network(network_id: str) -> str:
    return f"network {network_id}" if network_id else "the first network"


def compare_peers(context: RunContext, profiles: Mapping[str, Profile]) -> Iterator[str]:
    """Sentences about clients with another scale than most, or about evaluation data with another scale.

    Args:
        context: of the run.
        profiles: of the clients of a round, by client id.
    """
    inputs = {name: profile.inputs for name, profile in sorted(profiles.items()) if profile.inputs is not None}
    usual = _find_usual(inputs.values())
    if context.config.data.check == "off" or usual is None:
        return
    evaluation = context.evaluation_inputs
    if evaluation is not None and find_scale_problem(usual, evaluation):
        yield (
            f"the evaluation data range from {evaluation}, unlike the inputs of most of the {len(inputs)} clients "
            f"(such as from {usual}); {REMEDY}"
        )
    odd = [
        name
        for name, statistics in inputs.items()
        if find_scale_problem(statistics, usual)
        and (evaluation is None or not find_scale_problem(statistics, evaluation))
    ]
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        yield (
            f"the inputs of {', '.join(odd[:_SHOWN])}{more} differ in scale from those of most of the {len(inputs)} "
            f"clients (such as from {usual}); {REMEDY}"
        )


def _find_usual(inputs: Iterable[InputStatistics]) -> InputStatistics | None:
    """The client in the middle, which shares its scale with more than half of the others if any client does."""
    varied = (statistics for statistics in inputs if statistics.deviation)
    ordered = sorted(varied, key=attrgetter("deviation", "maximum", "minimum"))
    return ordered[len(ordered) // 2] if len(ordered) > 2 else None


class Pace:
    """Measures the progress of a run, and estimates the remaining time from the rounds that it has seen.

    Args:
        round_count: of the run.
        clock: monotonic seconds.
    """

    def __init__(self, round_count: int, clock: Callable[[], float]) -> None:
        self._round_count = round_count
        self._clock = clock
        self._first: tuple[int, float] | None = None  # the first round whose start was seen, and its time
        self._begins = False  # the last state was before the tasks of a round
        self._round = 0
        self._begun_s = 0.0
        self._position: tuple[int, int, int, tuple[str, ...]] | None = None

    def progress(self, state: RunState, away: tuple[str, ...] = ()) -> Progress | None:
        """The progress of the run; None if it has not changed. `away` describes absent clients without an answer."""
        if state.phase not in ("train", "aggregate") or not state.clients:
            self._begins = True
            return None
        if state.round != self._round:
            self._round, self._begun_s = state.round, self._clock()
            # A resumed run may start in the middle of a round.
            self._first = self._first or ((self._round, self._begun_s) if self._begins else None)
        taking_part = [client for client in state.clients.values() if client.stage not in ("skipped", "missing")]
        answered = sum(not client.open for client in taking_part)
        position = (state.round, answered, len(taking_part), away)
        if position == self._position:
            return None
        self._position = position
        return Progress(
            round=state.round,
            round_count=self._round_count,
            answered=answered,
            devices=len(taking_part),
            left_s=self._estimate_left_s(state.round),
            away=away,
        )

    def _estimate_left_s(self, round_number: int) -> float | None:
        """By the mean time of the rounds seen; None before the first."""
        if self._first is None or round_number == self._first[0]:
            return None
        each_s = (self._begun_s - self._first[1]) / (round_number - self._first[0])
        return max(0.0, each_s * (self._round_count - round_number + 1) - (self._clock() - self._begun_s))
