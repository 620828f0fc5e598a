"""What is measured of a search."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from search_benchmark.budgets import Share, queries
from search_benchmark.spaces import TARGET, Case
from subfleet.server.assignment import Candidate, ordered
from subfleet.server.search.listed import ListedSearch, exhaustive_search
from subfleet.server.search.paper import PaperSearch, PaperSettings
from subfleet.server.search.pareto import ParetoSearch
from subfleet.server.search.query import Choice, Query, Search
from subfleet.server.search.queue import Wish, given_now, most_wanted, plan_key, wish_of

__all__ = ["Large", "Small", "exhaustive_figures", "export_figures", "hit_rates", "large_figures"]

_EPSILONS = (0.2, 0.4, 0.6, 0.8, 0.9)
_T_MAX = (1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """Figures of a large space."""

    row: str
    assignments_per_s: float
    utilisation: float
    paper_utilisation: float
    violations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """Figures of a space that can be listed."""

    row: str
    fraction: float
    violations: int


def _stream(*names: object) -> Random:
    return Random(hashlib.sha256(repr(names).encode()).digest())  # noqa: S311 - draws are no secrets


def _served(search: Search, asked: Sequence[Query], first: int = 0) -> list[Choice]:
    choices = []
    for place, query in enumerate(asked, start=first):
        choices.append(search.choose(query, _stream(place)))
        search.learn(choices[-1].found)
    return choices


def _over(candidate: Candidate, query: Query) -> bool:
    limits = query.limits
    moved = candidate.weight_bytes
    links = (limits.downlink_bytes, limits.uplink_bytes)
    return candidate.training_memory_bytes[TARGET] > limits.memory_bytes or any(
        link is not None and moved > link for link in links
    )


def _violations(choices: Sequence[Choice], asked: Sequence[Query]) -> int:
    pairs = zip(choices, asked, strict=True)
    return sum(choice.fit is not None and _over(choice.fit.candidate, query) for choice, query in pairs)


def _shares(choices: Sequence[Choice], of: Sequence[bool]) -> list[float]:
    return [
        choice.fit.utilisation if choice.fit is not None else 0.0
        for choice, counted in zip(choices, of, strict=True)
        if counted
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def large_figures(case: Case, shares: Sequence[Share], *, count: int) -> Large:
    """Warm both searches with as many devices as are measured, then serve others, ours against the clock.

    Seconds are those of the processor, so that a busy machine counts no waiting.
    """
    ours = ParetoSearch(case.space, case.price, [TARGET], uniform=case.uniform)
    paper = PaperSearch(case.space, case.price, [TARGET])
    uniform = ListedSearch(case.uniform, case.price, [TARGET], goal=1)
    asked = queries(case, shares[: 2 * count])
    for search in (ours, paper):
        _served(search, asked[:count])
    rest = asked[count:]
    begun_s = time.process_time()
    given = _served(ours, rest, count)
    took_s = time.process_time() - begun_s
    theirs, widths = _served(paper, rest, count), _served(uniform, rest, count)
    feasible = [choice.fit is not None for choice in given]
    own, other, width = (_shares(choices, feasible) for choices in (given, theirs, widths))
    below = sum(mine < max(pair) for mine, *pair in zip(own, other, width, strict=True))
    over = _violations(given, rest)
    return Large(
        row=f"| {case.name} | {case.space.count():.1e} | {len(rest) / took_s:.0f} | {_mean(own):.4f} "
        f"| {_mean(other):.4f} | {_mean(width):.4f} | {below} | {over} |",
        assignments_per_s=len(rest) / took_s,
        utilisation=_mean(own),
        paper_utilisation=_mean(other),
        violations=over,
    )


def exhaustive_figures(case: Case, shares: Sequence[Share], *, count: int) -> Small:
    """Ours and the paper's, warm, against the best of all subnets of the space, by utilisation and by parameters."""
    best = exhaustive_search(case.space, case.price, [TARGET], goal=1)
    most = ListedSearch([one.spec for one in best.known], case.price, [TARGET])
    asked = queries(case, shares[: 2 * count])
    rest = asked[count:]
    found: dict[str, list[Choice]] = {}
    for name, search in (
        ("ours", ParetoSearch(case.space, case.price, [TARGET], uniform=case.uniform)),
        ("paper", PaperSearch(case.space, case.price, [TARGET])),
    ):
        _served(search, asked[:count])
        found[name] = _served(search, rest, count)
    optima = [choice.fit for choice in _served(best, rest)]
    pairs = [
        (ours.fit, theirs.fit, optimum)
        for ours, theirs, optimum in zip(found["ours"], found["paper"], optima, strict=True)
        if ours.fit is not None and theirs.fit is not None and optimum is not None
    ]
    own = [ours.utilisation / optimum.utilisation for ours, _, optimum in pairs]
    other = [theirs.utilisation / optimum.utilisation for _, theirs, optimum in pairs]
    parameters = [
        ours.fit.candidate.parameters / largest.fit.candidate.parameters
        for ours, largest in zip(found["ours"], _served(most, rest), strict=True)
        if ours.fit is not None and largest.fit is not None
    ]
    low = sum(one < 0.97 for one in own)
    over = _violations(found["ours"], rest)
    return Small(
        row=f"| {case.name} | {len(best.known)} | {_mean(own):.4f} | {min(own):.4f} | {low} of {len(own)} "
        f"| {_mean(parameters):.3f} | {_mean(other):.4f} |",
        fraction=_mean(own),
        violations=over,
    )


def hit_rates(case: Case, shares: Sequence[Share], *, count: int) -> Iterator[str]:
    """The paper's search over epsilon and T_max, each from an empty pool."""
    yield f"## The paper's search, hit rate and utilisation ({case.name})"
    yield ""
    yield "| epsilon | " + " | ".join(f"T_max {t_max}" for t_max in _T_MAX) + " |"
    yield "|---|" + "---:|" * len(_T_MAX)
    asked = queries(case, shares[:count])
    for epsilon in _EPSILONS:
        cells = []
        for t_max in _T_MAX:
            search = PaperSearch(case.space, case.price, [TARGET], PaperSettings(epsilon=epsilon, t_max=t_max))
            choices = _served(search, asked)
            used = [choice.fit.utilisation for choice in choices if choice.fit is not None]
            cells.append(f"{_mean([choice.hit for choice in choices]):.4f}, {_mean(used):.3f}")
        yield f"| {epsilon} | " + " | ".join(cells) + " |"


def export_figures(case: Case, shares: Sequence[Share], *, rounds: int, clients: int) -> Iterator[str]:
    """What devices lose while programs are missing. An estimate stands in for a program's exact plan."""
    yield f"## Programs ({case.name}, {clients} devices a round)"
    yield ""
    yield "| exports a round | lost, first 5 rounds | lost, last 5 | programs | of them ahead | a round ahead, last 5 |"
    yield "|---:|---:|---:|---:|---:|---:|"
    space = ordered([case.price(spec) for spec in case.uniform])
    for limit in (2, 8, 32):
        search = ParetoSearch(case.space, case.price, [TARGET], uniform=case.uniform)
        written: dict[str, Candidate] = {}
        lost, ahead = [], []
        for number in range(rounds):
            asked = queries(case, shares[number * clients : (number + 1) * clients])
            given = _given(_served(search, asked, number * clients), asked, written, space)
            wishes = [wish for _, wish in given if wish is not None]
            begun = most_wanted(wishes, written, limit)
            lost.append(sum(wish.lost for wish in wishes) / max(len(given), 1))
            ahead.append(len(begun))
            # What was given without a program was written at once; both count from the next round on.
            for candidate in (*(one for one, _ in given), *(case.price(wish.size) for wish in begun)):
                written[plan_key(TARGET, candidate.spec)] = candidate
        yield (
            f"| {limit} | {_mean(lost[:5]):.3f} | {_mean(lost[-5:]):.3f} | {len(written)} | {sum(ahead)} "
            f"| {_mean(ahead[-5:]):.1f} |"
        )


def _given(
    choices: Sequence[Choice], asked: Sequence[Query], written: Mapping[str, Candidate], space: Sequence[Candidate]
) -> list[tuple[Candidate, Wish | None]]:
    """What each device gets that anything fits, and what it wishes for."""
    given = []
    for choice, query in zip(choices, asked, strict=True):
        if choice.fit is None:
            continue
        chosen = choice.fit.candidate
        if plan_key(TARGET, chosen.spec) in written:
            given.append((chosen, None))
            continue
        now = given_now(written.values(), space, lambda one, of=query: not _over(one, of)) or chosen
        given.append((now, wish_of(chosen, now, query)))
    return given
