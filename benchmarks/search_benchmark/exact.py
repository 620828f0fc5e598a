"""A search's answers with written programs: exact plans decide, and correct later answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from search_benchmark.budgets import Share, create_queries
from search_benchmark.listed import list_space
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
"""Number of devices that explore before any is given a submodel."""
_TRIED = 6
"""Number of programs per budget that are written to find the largest fitting submodel."""
_SPOILT = 1.2
"""Factor of a device's memory budget in the planted error."""


class Plans:
    """Exact plans of written programs, kept in a file since each takes seconds of CPU time.

    The file is valid for one version of the exporter; delete it if plans have changed.

    Args:
        path: a file with a line of JSON for each plan, to which new ones are added; None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        plans = map(json.loads, lines)
        self._known = {(plan["space"], plan["architecture"]): int(plan["exact_bytes"]) for plan in plans}

    def find(self, case: Case, architecture: Architecture) -> int:
        """The planned peak memory of a submodel's program."""
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
    """The figures of one space.

    Attributes:
        row: its row of the table.
        fractions: parameters that each device is sent over the most that fit by exact plans; empty if the space
            is too large to be listed.
        first: whether each answer was above its budget without known plans.
        later: the same for other devices, with the correction by these plans.
        violations: tasks above their budget.
    """

    row: str
    fractions: tuple[float, ...]
    first: tuple[bool, ...]
    later: tuple[bool, ...]
    violations: int


@dataclass(slots=True, kw_only=True)
class _Server:
    """The part of a server that chooses submodels: a pool, and the plans of the written programs.

    Attributes:
        checks: whether a task is sent only if its program's plan fits; otherwise cost estimates decide, with
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

    def seek(self, device_queries: Sequence[Query], first: int) -> None:
        """Let devices explore one after the other, and learn their findings."""
        for number, query in enumerate(device_queries, start=first):
            self.search = self.search.learn(self.roles.assigner.search.explore(self._create_context(query, number)))

    def choose(self, query: Query) -> Architecture | None:
        """The assigner's answer: a program to write, or a written one that is about as good."""
        assigned = self.roles.assigner.assign(self._create_context(query))
        if assigned.candidate is None:
            return None
        return assigned.candidate.architecture if assigned.requested is None else assigned.requested.program.size

    def write(self, architecture: Architecture) -> int:
        """Write a program, and return its planned peak memory."""
        peak_bytes = self.plans.find(self.case, architecture)
        if self.checks:
            self.written[architecture.architecture_id] = WrittenSize(
                size=architecture, facts=ProgramFacts(planned_peak_bytes=peak_bytes)
            )
        return peak_bytes

    def choose_written(self, query: Query) -> Architecture | None:
        """The submodel that a device is sent: the search answers again until the program is written."""
        architecture = self.choose(query)
        while self.checks and architecture is not None and architecture.architecture_id not in self.written:
            self.write(architecture)
            architecture = self.choose(query)
        return architecture

    def _create_context(self, query: Query, number: int = 0) -> AssignmentContext:
        memory_bytes = int(query.limits.memory_bytes * (1 if self.checks else _SPOILT))
        return AssignmentContext(
            networks=MappingProxyType({self.case.network.id: self.case.network}),
            candidates=(),
            estimate=self.case.estimate,
            draw=Draw(seed=0, round=1, client_id=str(number)),
            target=TARGET,
            budget=replace(query.limits, memory_bytes=memory_bytes),
            search=self.search,
            written=MappingProxyType(self.written),
        )


def measure_exact(
    case: Case, shares: Sequence[Share], plans: Plans, *, count: int, listed: bool, checks: bool
) -> ExactFigures:
    """Serve a first round from an empty pool, then other devices, then the first devices again.

    Args:
        case: the space.
        shares: positions of the devices in their logs.
        plans: the known exact plans; others are added.
        count: devices of each kind to compare with exact plans.
        listed: whether the largest fitting submodel is searched in the whole space.
        checks: False plants an error: tasks are sent without checking plans.
    """
    device_queries = create_queries(case, shares[: 2 * _SEEKING])
    server = _Server(case=case, plans=plans, checks=checks)
    server.seek(device_queries[:_SEEKING], 0)
    answers = [(query, server.choose(query)) for query in device_queries[:_SEEKING]]
    first = [(query, architecture) for query, architecture in answers if architecture is not None][:count]
    first_over = tuple([server.write(architecture) > query.limits.memory_bytes for query, architecture in first])
    server.seek(device_queries[_SEEKING:], _SEEKING)
    answers = [(query, server.choose(query)) for query in device_queries[_SEEKING:]]
    second_answers = [(query, architecture) for query, architecture in answers if architecture is not None][:count]
    later_over = tuple(
        [plans.find(case, architecture) > query.limits.memory_bytes for query, architecture in second_answers]
    )
    assignments = [
        (query, architecture)
        for query, architecture in ((query, server.choose_written(query)) for query, _ in first)
        if architecture is not None
    ]
    exact = [(query, _apply_plan(case, plans, architecture)) for query, architecture in assignments]
    violations = sum(not fits(candidate, TARGET, query.limits) for query, candidate in exact)
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


def _compute_fractions(server: _Server, assignments: Sequence[tuple[Query, Candidate]]) -> list[float]:
    """For each device, the parameters of its submodel over the most that fit."""
    case, plans = server.case, server.plans
    listed = list_space(case.space, case.estimate, TARGET).known
    candidates = sorted(listed, key=lambda candidate: candidate.parameters, reverse=True)
    known = {
        program.size.architecture_id: _apply_plan(case, plans, program.size) for program in server.written.values()
    }
    known |= {candidate.architecture.architecture_id: candidate for _, candidate in assignments}
    fractions = []
    for query, assigned in assignments:
        fitting = _find_largest(candidates, query, case, plans, known)
        fractions.append(assigned.parameters / max(fitting, assigned.parameters))
    return fractions


def _find_largest(
    candidates: Sequence[Candidate], query: Query, case: Case, plans: Plans, known: dict[str, Candidate]
) -> int:
    """Parameters of the largest submodel that fits by its exact plan, judged by few plans.

    Args:
        candidates: the space, from the largest to the smallest.
        query: the device's query.
        case: the space.
        plans: the exact plans.
        known: submodels with their exact plans; this device's are added.
    """
    most = max((planned.parameters for planned in known.values() if fits(planned, TARGET, query.limits)), default=0)
    lowest, tries = min(_compare_with_estimate(case, planned) for planned in known.values()), 0
    for candidate in candidates:
        if candidate.parameters <= most or tries == _TRIED:
            break
        # The ratio of a plan to its cost estimate is expected to be at least the lowest known one.
        expected_bytes = int(lowest * candidate.training_memory_bytes[TARGET])
        likely = replace(candidate, training_memory_bytes=MappingProxyType({TARGET: expected_bytes}))
        if not fits(likely, TARGET, query.limits) or candidate.architecture.architecture_id in known:
            continue
        tries += 1
        planned = known[candidate.architecture.architecture_id] = _apply_plan(case, plans, candidate.architecture)
        if fits(planned, TARGET, query.limits):
            return planned.parameters
        lowest = min(lowest, _compare_with_estimate(case, planned))
    return most


def _compare_with_estimate(case: Case, planned: Candidate) -> float:
    return planned.training_memory_bytes[TARGET] / case.estimate(planned.architecture).training_memory_bytes[TARGET]
