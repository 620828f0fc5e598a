"""A small space, its cost estimates and device queries, shared by the tests of searches."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from types import MappingProxyType

from hypothesis import strategies as st

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.elastic.network import Network
from subfleet.elastic.spaces import SearchSpace, search_space, uniform_space
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.query import CostEstimates, EstimateIndex, Fit, FoundSize, Query, Search
from subfleet.search.searches import PaperSearch, PaperSettings, ParetoSearch, ParetoSettings

TARGET, OTHER_TARGET = "onnx", "executorch"
RATES = (0.25, 0.5, 0.75, 1)
MODEL = PreactResNet(input_shape=(1, 8, 8), class_count=10, widths=(16, 32), depths=(2, 2), group_size=4)


@cache
def network() -> Network:
    return network_of(MODEL)


@cache
def whole_space() -> SearchSpace:
    return search_space(network(), RATES)


@cache
def uniform_sizes() -> tuple[Architecture, ...]:
    return uniform_space(network(), RATES)


@cache
def estimate(architecture: Architecture) -> Candidate:
    cost = estimate_cost(network(), architecture, batch_size=8)
    memory = {TARGET: cost.training_memory_bytes, OTHER_TARGET: 2 * cost.training_memory_bytes}
    return Candidate(
        architecture=architecture,
        parameters=cost.parameters,
        forward_macs=cost.forward_macs,
        weight_bytes=cost.weight_bytes,
        update_bytes=cost.weight_bytes // 3,
        training_memory_bytes=MappingProxyType(memory),
    )


def ends() -> tuple[Candidate, Candidate]:
    space = whole_space()
    return estimate(space.architecture(space.smallest)), estimate(space.architecture(space.largest))


def stream(*names: object) -> Random:
    return Random(hashlib.sha256(repr(names).encode()).digest())


def log_between(low: float, high: float, fraction: float) -> int:
    """Return an amount that is below `low` at fraction 0, above `high` at 1, and exponential in the fraction."""
    return int(low * 0.8 * (high / low * 1.5) ** fraction)


def query_at(memory: float, link: float, *, macs: float | None = None) -> Query:
    low, high = ends()
    return Query(
        target=TARGET,
        limits=Budget(
            memory_bytes=log_between(low.training_memory_bytes[TARGET], high.training_memory_bytes[TARGET], memory),
            downlink_bytes=log_between(low.weight_bytes, high.weight_bytes, link),
            uplink_bytes=log_between(low.update_bytes, high.update_bytes, min(link + 0.1, 1)),
            forward_macs=None if macs is None else log_between(low.forward_macs, high.forward_macs, macs),
        ),
    )


def queries(count: int, seed: int = 0) -> list[Query]:
    rng = Random(seed)
    return [query_at(rng.random(), rng.random()) for _ in range(count)]


@st.composite
def any_query(draw: st.DrawFn) -> Query:
    """Queries with any combination of limits, including limits that no submodel meets."""
    low, high = ends()
    fractions = st.floats(0, 1)
    down = st.none() | fractions.map(lambda fraction: log_between(low.weight_bytes, high.weight_bytes, fraction))
    up = st.none() | fractions.map(lambda fraction: log_between(low.update_bytes, high.update_bytes, fraction))
    return Query(
        target=TARGET,
        limits=Budget(
            memory_bytes=log_between(
                low.training_memory_bytes[TARGET], high.training_memory_bytes[TARGET], draw(fractions)
            ),
            downlink_bytes=draw(down),
            uplink_bytes=draw(up),
            forward_macs=draw(
                st.none() | fractions.map(lambda fraction: log_between(low.forward_macs, high.forward_macs, fraction))
            ),
        ),
        below_parameters=draw(st.none() | st.integers(0, high.parameters)),
    )


def _relax_limit(draw: st.DrawFn, limit: int | None) -> int | None:
    """Draw a limit that is at least as wide; `None` is the widest."""
    return None if limit is None or draw(st.booleans()) else limit + draw(st.integers(0, 2 * limit))


@st.composite
def tight_and_loose_queries(draw: st.DrawFn) -> tuple[Query, Query]:
    query = draw(any_query())
    limits = query.limits
    looser = Budget(
        memory_bytes=limits.memory_bytes + draw(st.integers(0, 2 * limits.memory_bytes)),
        downlink_bytes=_relax_limit(draw, limits.downlink_bytes),
        uplink_bytes=_relax_limit(draw, limits.uplink_bytes),
        forward_macs=_relax_limit(draw, limits.forward_macs),
    )
    return query, replace(query, limits=looser)


def within(candidate: Candidate, query: Query) -> bool:
    """Whether a submodel meets every limit of a query, checked one by one."""
    limits = query.limits
    return (
        candidate.training_memory_bytes[query.target] <= limits.memory_bytes
        and (limits.downlink_bytes is None or candidate.weight_bytes <= limits.downlink_bytes)
        and (limits.uplink_bytes is None or candidate.update_bytes <= limits.uplink_bytes)
        and (limits.forward_macs is None or candidate.forward_macs <= limits.forward_macs)
        and (query.below_parameters is None or candidate.parameters < query.below_parameters)
    )


class ListedSearch:
    """The best of a fixed list of submodels."""

    pool: tuple[FoundSize, ...] = ()

    def __init__(self, architectures: Iterable[Architecture], costs: CostEstimates = estimate) -> None:
        self.known = EstimateIndex(TARGET, map(costs, architectures))

    def explore(self, query: Query, rng: Random) -> tuple[FoundSize, ...]:
        return ()

    def with_estimates(self, costs: CostEstimates) -> "ListedSearch":
        return self

    def learn(self, sizes: Sequence[FoundSize]) -> "ListedSearch":
        return self

    def best(self, query: Query) -> Fit | None:
        return self.known.best(query)


def exhaustive_search(space: SearchSpace, costs: CostEstimates = estimate) -> ListedSearch:
    """The best of a whole space."""
    return ListedSearch(map(space.architecture, space.enumerate(200_000)), costs)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a search for one device, and the sizes explored on the way."""

    fit: Fit | None
    explored: tuple[FoundSize, ...]

    @property
    def parameters(self) -> int:
        return 0 if self.fit is None else self.fit.candidate.parameters


@dataclass(kw_only=True)
class Serving:
    """A search that is replaced by its updated copy whenever it learns."""

    search: Search

    @property
    def pool(self) -> tuple[FoundSize, ...]:
        return self.search.pool

    @property
    def known(self) -> EstimateIndex:
        assert isinstance(self.search, PaperSearch | ParetoSearch | ListedSearch)
        return self.search.known

    def explore(self, query: Query, rng: Random) -> tuple[FoundSize, ...]:
        return self.search.explore(query, rng)

    def learn(self, sizes: Sequence[FoundSize]) -> None:
        self.search = self.search.learn(sizes)

    def best(self, query: Query) -> Fit | None:
        return self.search.best(query)


def paper_search(space: SearchSpace, settings: PaperSettings | None = None) -> Serving:
    return Serving(search=PaperSearch.begin(space, estimate, TARGET, settings or PaperSettings()))


def pareto_search(
    space: SearchSpace,
    estimated: CostEstimates = estimate,
    *,
    uniform: Sequence[Architecture] = (),
    settings: ParetoSettings | None = None,
) -> Serving:
    settings = settings or ParetoSettings()
    return Serving(search=ParetoSearch.begin(space, estimated, TARGET, uniform=uniform, settings=settings))


def answer_query(search: Serving, query: Query, rng: Random) -> Answer:
    """Explore, learn and answer, as for a device that is alone in its round."""
    explored = search.explore(query, rng)
    search.learn(explored)
    return Answer(fit=search.best(query), explored=explored)


def run(search: Serving, device_queries: list[Query], *, first: int = 0) -> list[Answer]:
    """Answer the queries of devices one after the other, each with its own random stream."""
    return [
        answer_query(search, query, stream("device", index)) for index, query in enumerate(device_queries, start=first)
    ]
