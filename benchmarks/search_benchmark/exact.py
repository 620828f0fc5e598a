"""What becomes of a search's answers once programs are written: exact plans decide, and the next answers learn."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from search_benchmark.budgets import Share, create_queries
from search_benchmark.listed import exhaustive_search
from search_benchmark.spaces import TARGET, Case
from subfleet.export.request_steps import training_step_of
from subfleet.export.targets.onnx import OnnxTarget
from subfleet.export.tracing import trace
from subfleet.methods.assigner import AssignmentContext, Draw, WrittenSize
from subfleet.methods.roles import Roles
from subfleet.programs.supply import build_train_request
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate, fits
from subfleet.search.query import Query, Search
from subfleet.search.queue import ProgramFacts

__all__ = ["ExactFigures", "Plans", "measure_exact"]

_SEEKING = 100
"""Devices that look before any is given something."""
_TRIED = 6
"""Submodels whose programs are written for a budget, to find the largest of all that fits."""
_SPOILT = 1.2
"""Times a device's memory, where an error is planted."""


class Plans:
    """Exact plans of written programs. Each takes seconds of the processor, so they are kept in a file.

    The file holds for one version of the exporter alone; delete it where plans have changed.

    Args:
        path: a line of JSON for each plan, which is added to; None keeps them in memory alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        found = map(json.loads, lines)
        self._known = {(one["space"], one["architecture"]): int(one["exact_bytes"]) for one in found}

    def find(self, case: Case, architecture: Architecture) -> int:
        """What the written program of a submodel is planned to take."""
        text = canonical_json(architecture).decode()
        if (case.name, text) not in self._known:
            step = training_step_of(build_train_request(case.network, architecture, TARGET, case.training))
            written = OnnxTarget().write_training(trace(step, OnnxTarget.lowerings), step)
            found_bytes = self._known[case.name, text] = written.memory.peak_bytes
            if self._path:
                with self._path.open("a") as file:
                    file.write(
                        json.dumps({"space": case.name, "architecture": text, "exact_bytes": found_bytes}) + "\n"
                    )
        return self._known[case.name, text]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactFigures:
    """Of one space.

    Attributes:
        row: of its table.
        fractions: parameters of what each device is sent, of the most that fits by exact plans; none where the space
            is too large to be listed.
        first: whether each answer was above its budget when no plan was known.
        later: the same of other devices, with the correction that these plans told.
        violations: tasks that were sent above their budget.
    """

    row: str
    fractions: tuple[float, ...]
    first: tuple[bool, ...]
    later: tuple[bool, ...]
    violations: int


@dataclass(slots=True, kw_only=True)
class _Server:
    """As much of a server as decides what is sent: a pool, and the plans of the programs that it has written.

    Attributes:
        checks: whether a task is sent only where its program's plan fits; else cost estimates decide, and those with
            too high a budget.
    """

    case: Case
    plans: Plans
    checks: bool
    roles: Roles = field(init=False)
    search: Search = field(init=False)
    written: dict[str, WrittenSize] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.roles = self.case.method.roles()
        self.search = self.case.method.start(self.case.network, self.case.estimate, TARGET)

    def seek(self, asked: Sequence[Query], first: int) -> None:
        """Let devices look, one after the other, and remember what they come by."""
        for place, query in enumerate(asked, start=first):
            self.search = self.search.learn(self.roles.assigner.search.explore(self._create_context(query, place)))

    def choose(self, query: Query) -> Architecture | None:
        """The answer of the search: a program to write, or one that is written and about as good."""
        assigned = self.roles.assigner.assign(self._create_context(query))
        if assigned.candidate is None:
            return None
        return assigned.candidate.architecture if assigned.requested is None else assigned.requested.program.size

    def write(self, architecture: Architecture) -> int:
        """Write a program, and tell its plan."""
        peak_bytes = self.plans.find(self.case, architecture)
        if self.checks:
            self.written[architecture.architecture_id] = WrittenSize(
                size=architecture, facts=ProgramFacts(planned_peak_bytes=peak_bytes)
            )
        return peak_bytes

    def choose_written(self, query: Query) -> Architecture | None:
        """What a device is sent in the end: where a program's plan is too large, the search answers once more."""
        architecture = self.choose(query)
        while self.checks and architecture is not None and architecture.architecture_id not in self.written:
            self.write(architecture)
            architecture = self.choose(query)
        return architecture

    def _create_context(self, query: Query, place: int = 0) -> AssignmentContext:
        memory_bytes = int(query.limits.memory_bytes * (1 if self.checks else _SPOILT))
        return AssignmentContext(
            networks=MappingProxyType({self.case.network.id: self.case.network}),
            candidates=(),
            estimate=self.case.estimate,
            draw=Draw(seed=0, round=1, client_id=str(place)),
            target=TARGET,
            budget=replace(query.limits, memory_bytes=memory_bytes),
            search=self.search,
            written=MappingProxyType(self.written),
        )


def measure_exact(
    case: Case, shares: Sequence[Share], plans: Plans, *, count: int, listed: bool, checks: bool
) -> ExactFigures:
    """A first round out of an empty pool, other devices after it, and then what the first are sent in the end.

    Args:
        case: the space.
        shares: of the devices.
        plans: the exact plans that are known; others are added.
        count: devices of each kind whose answers are held against exact plans.
        listed: whether the most that fits is looked for in all of the space.
        checks: False plants an error: tasks are sent without a look at plans.
    """
    asked = create_queries(case, shares[: 2 * _SEEKING])
    server = _Server(case=case, plans=plans, checks=checks)
    server.seek(asked[:_SEEKING], 0)
    answers = [(query, server.choose(query)) for query in asked[:_SEEKING]]
    first = [(query, architecture) for query, architecture in answers if architecture is not None][:count]
    first_over = tuple([server.write(architecture) > query.limits.memory_bytes for query, architecture in first])
    server.seek(asked[_SEEKING:], _SEEKING)
    answers = [(query, server.choose(query)) for query in asked[_SEEKING:]]
    others = [(query, architecture) for query, architecture in answers if architecture is not None][:count]
    later_over = tuple([plans.find(case, architecture) > query.limits.memory_bytes for query, architecture in others])
    sent = [
        (query, architecture)
        for query, architecture in ((query, server.choose_written(query)) for query, _ in first)
        if architecture is not None
    ]
    exact = [(query, _apply_plan(case, plans, architecture)) for query, architecture in sent]
    violations = sum(not fits(one, TARGET, query.limits) for query, one in exact)
    fractions = tuple(_compute_fractions(server, exact)) if listed else ()
    mean = f"{sum(fractions) / len(fractions):.4f} | {min(fractions):.4f}" if fractions else "| "
    return ExactFigures(
        row=f"| {case.name} | {sum(first_over)} of {len(first_over)} | {sum(later_over)} of {len(later_over)} | {mean} "
        f"| {len(server.written)} | {violations} |",
        fractions=fractions,
        first=first_over,
        later=later_over,
        violations=violations,
    )


def _apply_plan(case: Case, plans: Plans, architecture: Architecture) -> Candidate:
    """A submodel with its exact plan in place of its cost estimate."""
    return replace(
        case.estimate(architecture), training_memory_bytes=MappingProxyType({TARGET: plans.find(case, architecture)})
    )


def _compute_fractions(server: _Server, sent: Sequence[tuple[Query, Candidate]]) -> list[float]:
    """Of each device, the parameters that it is sent by the most that fits."""
    case, plans = server.case, server.plans
    listed = exhaustive_search(case.space, case.estimate, TARGET).known
    every = sorted(listed, key=lambda one: one.parameters, reverse=True)
    known = {one.size.architecture_id: _apply_plan(case, plans, one.size) for one in server.written.values()}
    known |= {one.architecture.architecture_id: one for _, one in sent}
    found = []
    for query, given in sent:
        fitting = _find_largest(every, query, case, plans, known)
        found.append(given.parameters / max(fitting, given.parameters))
    return found


def _find_largest(
    every: Sequence[Candidate], query: Query, case: Case, plans: Plans, known: dict[str, Candidate]
) -> int:
    """Parameters of the largest submodel that fits by its exact plan, as far as few plans tell.

    Args:
        every: the space, from the largest to the smallest.
        query: of the device.
        case: the space.
        plans: the exact plans.
        known: submodels with their exact plans, to which those of this device are added.
    """
    most = max((one.parameters for one in known.values() if fits(one, TARGET, query.limits)), default=0)
    lowest, tried = min(_compare_with_estimate(case, one) for one in known.values()), 0
    for candidate in every:
        if candidate.parameters <= most or tried == _TRIED:
            break
        # The ratio of a plan to its cost estimate is expected to be at least the lowest known one.
        expected_bytes = int(lowest * candidate.training_memory_bytes[TARGET])
        likely = replace(candidate, training_memory_bytes=MappingProxyType({TARGET: expected_bytes}))
        if not fits(likely, TARGET, query.limits) or candidate.architecture.architecture_id in known:
            continue
        tried += 1
        one = known[candidate.architecture.architecture_id] = _apply_plan(case, plans, candidate.architecture)
        if fits(one, TARGET, query.limits):
            return one.parameters
        lowest = min(lowest, _compare_with_estimate(case, one))
    return most


def _compare_with_estimate(case: Case, planned: Candidate) -> float:
    return planned.training_memory_bytes[TARGET] / case.estimate(planned.architecture).training_memory_bytes[TARGET]
