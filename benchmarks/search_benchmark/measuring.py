"""Measurements of a search."""

import hashlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from search_benchmark.budgets import Share, create_queries
from search_benchmark.listed import ListedSearch, list_space
from search_benchmark.long_search import find_most_parameters
from search_benchmark.spaces import TARGET, TINY, Case, create_case
from subfleet.search.candidates import Candidate, order_candidates
from subfleet.search.query import Fit, Query, Search
from subfleet.search.queue import RequestedProgram, SizedProgram, give_written, rank_requested, request_program
from subfleet.search.searches import PaperSearch, PaperSettings
from subfleet.serving.session import freeze_loaded_objects

__all__ = ["Figures", "build_export_table", "build_hit_rate_table", "measure_exhaustive", "measure_large"]

_EPSILONS = (0.2, 0.4, 0.6, 0.8, 0.9)
_T_MAX = (1, 2, 5, 10, 20)
_ROUND = 30
"""Number of devices of a round; all explore before any of them is given a submodel."""
_FIRST, _WARMING = 100, 1500
"""Devices of the first round with an empty pool, and all devices before the warm figures, including these."""
_JUDGED, _TRIALS, _KEPT = 40, 2000, 24
"""Budgets of the long search, its cost estimates for each, and the submodels that it continues from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one space.

    Attributes:
        row: its row of the table.
        mean: parameters of the answers over the most that fit, averaged over devices that some submodel fits.
        utilisation: mean utilisation of the answers.
        paper_utilisation: the same for the paper's search.
        warm_per_s: devices served per second after warm-up; 0 if it was not measured.
        cold_per_s: the same for the first round, setup included.
        first_round_s: CPU seconds of that round.
    """

    row: str
    mean: float
    utilisation: float
    paper_utilisation: float
    warm_per_s: float = 0.0
    cold_per_s: float = 0.0
    first_round_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A search's answer to one device."""

    fit: Fit | None

    @property
    def parameters(self) -> int:
        """Parameters of the submodel; 0 without one."""
        return 0 if self.fit is None else self.fit.candidate.parameters


def _create_stream(*names: object) -> Random:
    return Random(hashlib.sha256(repr(names).encode()).digest())  # noqa: S311 - draws are no secrets


@dataclass(kw_only=True)
class _Server:
    """Holds the current search."""

    search: Search


def _create_our_search(case: Case) -> _Server:
    """The default configuration's search with nothing learned yet."""
    return _Server(search=case.method.start(case.network, case.estimate, TARGET))


def _create_paper_search(case: Case, settings: PaperSettings | None = None) -> _Server:
    """The paper's search with nothing learned yet."""
    return _Server(search=PaperSearch.begin(case.space, case.estimate, TARGET, settings or PaperSettings()))


def _serve(server: _Server, device_queries: Sequence[Query], first: int = 0, *, at_once: int = 1) -> list[Answer]:
    """Serve devices in groups; the paper's algorithm serves one at a time."""
    answers: list[Answer] = []
    for begin in range(0, len(device_queries), at_once):
        group = device_queries[begin : begin + at_once]
        for number, query in enumerate(group, start=first + begin):
            server.search = server.search.learn(server.search.explore(query, _create_stream(number)))
        answers += [Answer(fit=server.search.best(query)) for query in group]
    return answers


def _exceeds(candidate: Candidate, query: Query) -> bool:
    limits = query.limits
    weight_bytes = candidate.weight_bytes
    links = (limits.downlink_bytes, limits.uplink_bytes)
    return candidate.training_memory_bytes[TARGET] > limits.memory_bytes or any(
        link is not None and weight_bytes > link for link in links
    )


def _fits(query: Query, candidate: Candidate) -> bool:
    return not _exceeds(candidate, query)


def _count_violations(answers: Sequence[Answer], device_queries: Sequence[Query]) -> int:
    pairs = zip(answers, device_queries, strict=True)
    return sum(answer.fit is not None and _exceeds(answer.fit.candidate, query) for answer, query in pairs)


def _count_fewer(answers: Sequence[Answer], device_queries: Sequence[Query]) -> int:
    """Count pairs in a round where a device with no smaller budget gets fewer parameters."""
    devices = [
        (query.limits.memory_bytes, query.limits.downlink_bytes or 0, query.limits.uplink_bytes or 0, answer.parameters)
        for query, answer in zip(device_queries, answers, strict=True)
    ]
    rounds = (devices[begin : begin + _ROUND] for begin in range(0, len(devices), _ROUND))
    return sum(
        all(small <= large for small, large in zip(device[:3], other[:3], strict=True)) and device[3] > other[3]
        for group in rounds
        for device in group
        for other in group
    )


def _average(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _average_utilisation(answers: Sequence[Answer]) -> float:
    return _average([answer.fit.utilisation for answer in answers if answer.fit is not None])


def _compute_fractions(answers: Sequence[Answer], most: Sequence[int]) -> list[float]:
    return [answer.parameters / best for answer, best in zip(answers, most, strict=True) if best]


def measure_large(name: str, shares: Sequence[Share], *, count: int) -> Figures:
    """Serve a first round, warm up both searches, then time ours and compare the answers.

    Seconds are CPU time, so that waiting on a busy machine does not count.
    """
    create_case(TINY).ends[0].training_memory_bytes[TARGET]
    freeze_loaded_objects()  # as a server does at its start
    started_s = time.process_time()
    case = create_case(name)
    device_queries = create_queries(case, shares[: _WARMING + count])
    our_search = _create_our_search(case)
    _serve(our_search, device_queries[:_FIRST], at_once=_FIRST)
    first_s = time.process_time() - started_s
    _serve(our_search, device_queries[_FIRST:_WARMING], _FIRST, at_once=_ROUND)
    paper = _create_paper_search(case)
    _serve(paper, device_queries[:_WARMING])
    rest = device_queries[_WARMING:]
    started_s = time.process_time()
    answers = _serve(our_search, rest, _WARMING, at_once=_ROUND)
    warm_per_s = len(rest) / (time.process_time() - started_s)
    paper_answers = _serve(paper, rest, _WARMING)
    uniform_answers = _serve(_Server(search=ListedSearch(case.uniform, case.estimate, TARGET)), rest)
    below = sum(
        own.parameters < max(other.parameters for other in references)
        for own, *references in zip(answers, paper_answers, uniform_answers, strict=True)
    )
    judged = min(_JUDGED, len(rest) // 15)
    most = [
        max(_search_long(case, query, answer, number), answer.parameters)
        for number, (query, answer) in enumerate(zip(rest[:judged], answers[:judged], strict=True))
    ]
    fractions, paper_fractions, uniform_fractions = (
        _compute_fractions(served[:judged], most) for served in (answers, paper_answers, uniform_answers)
    )
    return Figures(
        row=f"| {case.name} | {case.space.count():.1e} | {warm_per_s:.0f} | {_FIRST / first_s:.1f} | {first_s:.2f} "
        f"| {_average(fractions):.4f} | {min(fractions):.4f} | {_average(paper_fractions):.4f} "
        f"| {_average(uniform_fractions):.4f} | {_average_utilisation(answers):.4f} | {below} "
        f"| {_count_fewer(answers, rest)} | {_count_violations(answers, rest)} |",
        mean=_average(fractions),
        utilisation=_average_utilisation(answers),
        paper_utilisation=_average_utilisation(paper_answers),
        warm_per_s=warm_per_s,
        cold_per_s=_FIRST / first_s,
        first_round_s=first_s,
    )


def _search_long(case: Case, query: Query, answer: Answer, number: int) -> int:
    """The result of the long search, started from our answer."""
    if answer.fit is None:
        return 0
    architecture = answer.fit.candidate.architecture
    starts = [case.space.genes_of(architecture)] if case.space.holds(architecture) else []
    return find_most_parameters(
        case, query, starts, trials=_TRIALS, survivors=_KEPT, rng=_create_stream("long", number)
    )


def measure_exhaustive(case: Case, shares: Sequence[Share], *, count: int) -> Figures:
    """Compare our search and the paper's, cold and warm, with the largest submodel that fits."""
    listed_search = list_space(case.space, case.estimate, TARGET)
    device_queries = create_queries(case, shares[: 2 * count])
    optima = [0 if (fit := listed_search.best(query)) is None else fit.candidate.parameters for query in device_queries]
    answers = _serve(_create_our_search(case), device_queries, at_once=_ROUND)
    paper_answers = _serve(_create_paper_search(case), device_queries)
    first, cold, warm = (
        _compute_fractions(answers[part], optima[part]) for part in (slice(_ROUND), slice(count), slice(count, None))
    )
    return Figures(
        row=f"| {case.name} | {len(listed_search.known)} | {_average(first):.4f} | {min(first):.4f} "
        f"| {_average(cold):.4f} | {min(cold):.4f} | {_average(warm):.4f} | {min(warm):.4f} "
        f"| {sum(fraction < 0.95 for fraction in (*cold, *warm))} of {len(cold) + len(warm)} "
        f"| {_average(_compute_fractions(paper_answers[count:], optima[count:])):.4f} "
        f"| {_count_fewer(answers, device_queries)} | {_count_violations(answers, device_queries)} |",
        mean=_average(warm),
        utilisation=_average_utilisation(answers),
        paper_utilisation=_average_utilisation(paper_answers),
    )


def build_hit_rate_table(case: Case, shares: Sequence[Share], *, count: int) -> Iterator[str]:
    """The paper's search over epsilon and T_max, each from an empty pool."""
    yield f"## The paper's search, hit rate and utilisation ({case.name})"
    yield ""
    yield "| epsilon | " + " | ".join(f"T_max {t_max}" for t_max in _T_MAX) + " |"
    yield "|---|" + "---:|" * len(_T_MAX)
    device_queries = create_queries(case, shares[:count])
    for epsilon in _EPSILONS:
        cells = []
        for t_max in _T_MAX:
            settings = PaperSettings(epsilon=epsilon, t_max=t_max)
            answers = _serve(_create_paper_search(case, settings), device_queries)
            hits = [_reaches_limit(case, settings, _create_stream(number)) for number in range(len(device_queries))]
            cells.append(f"{_average(hits):.4f}, {_average_utilisation(answers):.3f}")
        yield f"| {epsilon} | " + " | ".join(cells) + " |"


def _reaches_limit(case: Case, settings: PaperSettings, rng: Random) -> bool:
    """Whether the paper's search draws until its limit with this stream."""
    for _ in range(settings.t_max + 1):
        if rng.random() <= settings.epsilon:
            return False
        case.space.random(rng)
    return True


def build_export_table(case: Case, shares: Sequence[Share], *, rounds: int, clients: int) -> Iterator[str]:
    """The parameters lost while programs are missing. Cost estimates stand in for exact plans."""
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
            device_queries = create_queries(case, shares[number * clients : (number + 1) * clients])
            assigned = _assign(
                _serve(search, device_queries, number * clients, at_once=clients), device_queries, written, space
            )
            requested_programs = [
                requested_program for _, requested_program in assigned if requested_program is not None
            ]
            started = rank_requested(requested_programs, written, limit)
            lost.append(sum(requested_program.lost for requested_program in requested_programs) / max(len(assigned), 1))
            ahead.append(len(started))
            # Submodels that were given without a program are written now; they count from the next round on.
            for candidate in (
                *(candidate for candidate, _ in assigned),
                *(case.estimate(requested_program.program.size) for requested_program in started),
            ):
                written[SizedProgram(size=candidate.architecture, target=TARGET).key] = candidate
        yield (
            f"| {limit} | {_average(lost[:5]):.3f} | {_average(lost[-5:]):.3f} | {len(written)} | {sum(ahead)} "
            f"| {_average(ahead[-5:]):.1f} |"
        )


def _assign(
    answers: Sequence[Answer],
    device_queries: Sequence[Query],
    written: Mapping[str, Candidate],
    space: Sequence[Candidate],
) -> list[tuple[Candidate, RequestedProgram | None]]:
    """The written submodel that each device gets, and the program requested for it."""
    assigned = []
    for answer, query in zip(answers, device_queries, strict=True):
        if answer.fit is None:
            continue
        best = answer.fit.candidate
        now = give_written(written.values(), space, partial(_fits, query)) or best
        assigned.append((now, request_program(best, now, TARGET)))
    return assigned
