"""What is measured of a search."""

import hashlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from search_benchmark.budgets import Share, create_queries
from search_benchmark.listed import ListedSearch, exhaustive_search
from search_benchmark.long_search import find_most_parameters
from search_benchmark.spaces import TARGET, TINY, Case, create_case
from subfleet.search.candidates import Candidate, order_candidates
from subfleet.search.paper import PaperSearch, PaperSettings
from subfleet.search.query import Explored, Fit, Query, Search
from subfleet.search.queue import RequestedProgram, SizedProgram, give_written, rank_requested, request_program
from subfleet.serving.session import freeze_loaded_objects

__all__ = ["Figures", "build_export_table", "build_hit_rate_table", "measure_exhaustive", "measure_large"]

_EPSILONS = (0.2, 0.4, 0.6, 0.8, 0.9)
_T_MAX = (1, 2, 5, 10, 20)
_ROUND = 30
"""Devices of a round: all look for submodels before any of them is given one."""
_FIRST, _WARMING = 100, 1500
"""Devices at once out of an empty pool, and all that are served before the warm figures, these among them."""
_JUDGED, _TRIALS, _KEPT = 40, 2000, 24
"""Budgets that the long search looks at, what it cost estimates for each, and how many of these it goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one space.

    Attributes:
        row: of its table.
        mean: parameters of the answers as a fraction of the most that fit, over devices that anything fits.
        used: mean utilisation of the answers.
        paper_used: the same of the paper's search.
        warm_per_s: devices that are looked for and answered in a second; 0 where it was not measured.
        cold_per_s: the same of the first round, with all that has to be made before it.
        first_round_s: of that round.
    """

    row: str
    mean: float
    used: float
    paper_used: float
    warm_per_s: float = 0.0
    cold_per_s: float = 0.0
    first_round_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a search gave one device, and what it came by on its way."""

    fit: Fit | None
    explored: Explored

    @property
    def parameters(self) -> int:
        """Of the submodel; 0 without one."""
        return 0 if self.fit is None else self.fit.candidate.parameters


def _create_stream(*names: object) -> Random:
    return Random(hashlib.sha256(repr(names).encode()).digest())  # noqa: S311 - draws are no secrets


@dataclass(kw_only=True)
class _Server:
    """As much of a server as holds a search: what it has learned takes its place."""

    search: Search


def _create_our_search(case: Case) -> _Server:
    """The search of the default configuration, which knows nothing yet."""
    return _Server(search=case.method.start(case.network, case.estimate, TARGET))


def _create_paper_search(case: Case, settings: PaperSettings | None = None) -> _Server:
    """The paper's search, which knows nothing yet."""
    return _Server(search=PaperSearch.over(case.space, case.estimate, TARGET, settings))


def _serve(server: _Server, asked: Sequence[Query], first: int = 0, *, at_once: int = 1) -> list[Answer]:
    """So many devices at once; the paper's algorithm serves one after the other."""
    answers: list[Answer] = []
    for begin in range(0, len(asked), at_once):
        together = asked[begin : begin + at_once]
        explored = []
        for place, query in enumerate(together, start=first + begin):
            explored.append(server.search.explore(query, _create_stream(place)))
            server.search = server.search.learn(explored[-1].sizes)
        best = server.search.best
        answers += [Answer(fit=best(query), explored=one) for query, one in zip(together, explored, strict=True)]
    return answers


def _exceeds(candidate: Candidate, query: Query) -> bool:
    limits = query.limits
    moved = candidate.weight_bytes
    links = (limits.downlink_bytes, limits.uplink_bytes)
    return candidate.training_memory_bytes[TARGET] > limits.memory_bytes or any(
        link is not None and moved > link for link in links
    )


def _fits(query: Query, candidate: Candidate) -> bool:
    return not _exceeds(candidate, query)


def _count_violations(answers: Sequence[Answer], asked: Sequence[Query]) -> int:
    pairs = zip(answers, asked, strict=True)
    return sum(answer.fit is not None and _exceeds(answer.fit.candidate, query) for answer, query in pairs)


def _count_fewer(answers: Sequence[Answer], asked: Sequence[Query]) -> int:
    """Pairs of devices of a round of which the one with no less of any budget has fewer parameters."""
    every = [
        (query.limits.memory_bytes, query.limits.downlink_bytes or 0, query.limits.uplink_bytes or 0, answer.parameters)
        for query, answer in zip(asked, answers, strict=True)
    ]
    rounds = (every[begin : begin + _ROUND] for begin in range(0, len(every), _ROUND))
    return sum(
        all(less <= more for less, more in zip(one[:3], other[:3], strict=True)) and one[3] > other[3]
        for together in rounds
        for one in together
        for other in together
    )


def _average(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _average_utilisation(answers: Sequence[Answer]) -> float:
    return _average([answer.fit.utilisation for answer in answers if answer.fit is not None])


def _compute_fractions(answers: Sequence[Answer], most: Sequence[int]) -> list[float]:
    return [answer.parameters / best for answer, best in zip(answers, most, strict=True) if best]


def measure_large(name: str, shares: Sequence[Share], *, count: int) -> Figures:
    """Begin with a first round, warm both searches, then serve others, ours against the clock.

    Seconds are those of the processor, so that a busy machine counts no waiting.
    """
    create_case(TINY).ends[0].training_memory_bytes[TARGET]
    freeze_loaded_objects()  # as a server does before it serves
    begun_s = time.process_time()
    case = create_case(name)
    asked = create_queries(case, shares[: _WARMING + count])
    ours = _create_our_search(case)
    _serve(ours, asked[:_FIRST], at_once=_FIRST)
    first_s = time.process_time() - begun_s
    _serve(ours, asked[_FIRST:_WARMING], _FIRST, at_once=_ROUND)
    paper = _create_paper_search(case)
    _serve(paper, asked[:_WARMING])
    rest = asked[_WARMING:]
    begun_s = time.process_time()
    given = _serve(ours, rest, _WARMING, at_once=_ROUND)
    warm_per_s = len(rest) / (time.process_time() - begun_s)
    theirs = _serve(paper, rest, _WARMING)
    widths = _serve(_Server(search=ListedSearch(case.uniform, case.estimate, TARGET)), rest)
    below = sum(
        mine.parameters < max(one.parameters for one in others)
        for mine, *others in zip(given, theirs, widths, strict=True)
    )
    judged = min(_JUDGED, len(rest) // 15)
    most = [
        max(_search_long(case, query, answer, place), answer.parameters)
        for place, (query, answer) in enumerate(zip(rest[:judged], given[:judged], strict=True))
    ]
    own, other, width = (_compute_fractions(answers[:judged], most) for answers in (given, theirs, widths))
    return Figures(
        row=f"| {case.name} | {case.space.count():.1e} | {warm_per_s:.0f} | {_FIRST / first_s:.1f} | {first_s:.2f} "
        f"| {_average(own):.4f} | {min(own):.4f} | {_average(other):.4f} | {_average(width):.4f} "
        f"| {_average_utilisation(given):.4f} | {below} | {_count_fewer(given, rest)} "
        f"| {_count_violations(given, rest)} |",
        mean=_average(own),
        used=_average_utilisation(given),
        paper_used=_average_utilisation(theirs),
        warm_per_s=warm_per_s,
        cold_per_s=_FIRST / first_s,
        first_round_s=first_s,
    )


def _search_long(case: Case, query: Query, answer: Answer, place: int) -> int:
    """What the long search finds that begins where ours ended, so that it is no worse."""
    if answer.fit is None:
        return 0
    architecture = answer.fit.candidate.architecture
    starts = [case.space.genes_of(architecture)] if case.space.holds(architecture) else []
    return find_most_parameters(case, query, starts, trials=_TRIALS, kept=_KEPT, rng=_create_stream("long", place))


def measure_exhaustive(case: Case, shares: Sequence[Share], *, count: int) -> Figures:
    """Ours and the paper's against the largest submodel that fits of all of the space, from an empty pool and warm."""
    most = exhaustive_search(case.space, case.estimate, TARGET)
    asked = create_queries(case, shares[: 2 * count])
    optima = [0 if (fit := most.best(query)) is None else fit.candidate.parameters for query in asked]
    given = _serve(_create_our_search(case), asked, at_once=_ROUND)
    theirs = _serve(_create_paper_search(case), asked)
    first, cold, warm = (
        _compute_fractions(given[part], optima[part]) for part in (slice(_ROUND), slice(count), slice(count, None))
    )
    return Figures(
        row=f"| {case.name} | {len(most.known)} | {_average(first):.4f} | {min(first):.4f} | {_average(cold):.4f} "
        f"| {min(cold):.4f} | {_average(warm):.4f} | {min(warm):.4f} | {sum(one < 0.95 for one in (*cold, *warm))} of "
        f"{len(cold) + len(warm)} | {_average(_compute_fractions(theirs[count:], optima[count:])):.4f} "
        f"| {_count_fewer(given, asked)} | {_count_violations(given, asked)} |",
        mean=_average(warm),
        used=_average_utilisation(given),
        paper_used=_average_utilisation(theirs),
    )


def build_hit_rate_table(case: Case, shares: Sequence[Share], *, count: int) -> Iterator[str]:
    """The paper's search over epsilon and T_max, each from an empty pool."""
    yield f"## The paper's search, hit rate and utilisation ({case.name})"
    yield ""
    yield "| epsilon | " + " | ".join(f"T_max {t_max}" for t_max in _T_MAX) + " |"
    yield "|---|" + "---:|" * len(_T_MAX)
    asked = create_queries(case, shares[:count])
    for epsilon in _EPSILONS:
        cells = []
        for t_max in _T_MAX:
            search = _create_paper_search(case, PaperSettings(epsilon=epsilon, t_max=t_max))
            answers = _serve(search, asked)
            cells.append(
                f"{_average([answer.explored.hit for answer in answers]):.4f}, {_average_utilisation(answers):.3f}"
            )
        yield f"| {epsilon} | " + " | ".join(cells) + " |"


def build_export_table(case: Case, shares: Sequence[Share], *, rounds: int, clients: int) -> Iterator[str]:
    """What devices lose while programs are missing. A cost estimate stands in for a program's exact plan."""
    yield f"## Programs ({case.name}, {clients} devices a round)"
    yield ""
    yield "| exports a round | lost, first 5 rounds | lost, last 5 | programs | of them ahead | a round ahead, last 5 |"
    yield "|---:|---:|---:|---:|---:|---:|"
    space = order_candidates([case.estimate(architecture) for architecture in case.uniform])
    for limit in (2, 8, 32):
        search = _create_our_search(case)
        written: dict[str, Candidate] = {}
        lost, ahead = [], []
        for number in range(rounds):
            asked = create_queries(case, shares[number * clients : (number + 1) * clients])
            given = _assign(_serve(search, asked, number * clients, at_once=clients), asked, written, space)
            requested_programs = [requested_program for _, requested_program in given if requested_program is not None]
            begun = rank_requested(requested_programs, written, limit)
            lost.append(sum(requested_program.lost for requested_program in requested_programs) / max(len(given), 1))
            ahead.append(len(begun))
            # What was given without a program was written at once; both count from the next round on.
            for candidate in (
                *(one for one, _ in given),
                *(case.estimate(requested_program.program.size) for requested_program in begun),
            ):
                written[SizedProgram(size=candidate.architecture, target=TARGET).key] = candidate
        yield (
            f"| {limit} | {_average(lost[:5]):.3f} | {_average(lost[-5:]):.3f} | {len(written)} | {sum(ahead)} "
            f"| {_average(ahead[-5:]):.1f} |"
        )


def _assign(
    answers: Sequence[Answer], asked: Sequence[Query], written: Mapping[str, Candidate], space: Sequence[Candidate]
) -> list[tuple[Candidate, RequestedProgram | None]]:
    """What each device gets that anything fits, and what it requested programs for."""
    given = []
    for answer, query in zip(answers, asked, strict=True):
        if answer.fit is None:
            continue
        chosen = answer.fit.candidate
        now = give_written(written.values(), space, partial(_fits, query)) or chosen
        given.append((now, request_program(chosen, now, TARGET)))
    return given
