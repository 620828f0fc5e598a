"""Clients that are assigned submodels, with budgets close to their needs, and assertions about the assignment."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from subfleet.arrays.codecs import encode_changes
from subfleet.elastic.network import BUFFER_ROLES
from subfleet.methods.assigner import AssignmentContext, WrittenSize
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.search.candidates import Candidate
from subfleet.search.queue import ProgramFacts
from subfleet.testing.rounds import make_assignee


def draw_budget(context: RunContext, generator: random.Random) -> Budget:
    """A budget close to what submodels need."""

    def draw_near(needs: Callable[[Candidate], int]) -> int:
        return needs(generator.choice(context.first.candidates)) + generator.randint(-1, 1)

    return Budget(
        memory_bytes=draw_near(lambda candidate: candidate.training_memory_bytes["onnx"]),
        downlink_bytes=generator.choice([None, draw_near(lambda candidate: candidate.weight_bytes)]),
        uplink_bytes=generator.choice([None, draw_near(lambda candidate: candidate.update_bytes)]),
        disk_bytes=generator.choice([None, draw_near(lambda candidate: candidate.disk_bytes)]),
        forward_macs=generator.choice([None, None, draw_near(lambda candidate: candidate.forward_macs)]),
    )


def draw_question(context: RunContext, generator: random.Random, budget: Budget) -> AssignmentContext:
    """A client to be assigned a submodel. Some programs are written, and some of these are larger than estimated."""
    written = {
        size.architecture.architecture_id: WrittenSize(
            size=size.architecture,
            facts=ProgramFacts(planned_peak_bytes=size.training_memory_bytes["onnx"] + generator.choice([0, 1, 10**6])),
        )
        for size in generator.sample(context.first.candidates, min(3, len(context.first.candidates)))
    }
    return replace(
        make_assignee(context, generator.choice("abc"), round_number=generator.randint(1, 5)),
        budget=budget,
        below=generator.choice([None, None, generator.choice(context.first.candidates)]),
        written=written,
        previous=generator.choice([None, generator.choice(context.space)]),
    )


def assert_fits(context: RunContext, waiting: AssignmentContext, candidate: Candidate) -> None:
    """Assert that the estimate, the written program and the update of an assigned submodel fit the budget."""
    budget, architecture = waiting.budget, candidate.architecture
    assert_estimate_fits(context.first.estimate(architecture), budget)
    known = waiting.written.get(architecture.architecture_id)
    assert known is None or (known.facts.planned_peak_bytes or 0) <= budget.memory_bytes, (
        f"the program of {architecture.name!r} needs more memory than its budget"
    )
    sent_bytes = _count_sent_bytes(context, architecture, budget)
    assert budget.uplink_bytes is None or sent_bytes <= budget.uplink_bytes, (
        f"the update of {architecture.name!r} exceeds the uplink budget"
    )
    smaller = waiting.below is None or candidate.order < waiting.below.order
    assert smaller, f"{architecture.name!r} is not smaller than the submodel that was too large"


def assert_estimate_fits(estimate: Candidate, budget: Budget) -> None:
    """Assert that the cost estimate of a submodel fits a budget."""
    needs = {
        "memory_bytes": estimate.training_memory_bytes["onnx"],
        "downlink_bytes": estimate.weight_bytes,
        "disk_bytes": estimate.disk_bytes,
        "forward_macs": estimate.forward_macs,
    }
    for resource, need in needs.items():
        limit = getattr(budget, resource)
        assert limit is None or need <= limit, (
            f"{estimate.architecture.name!r} needs {need} {resource}, but the budget is {limit}"
        )


def _count_sent_bytes(context: RunContext, architecture: Architecture, budget: Budget) -> int:
    """The size of the update that a client with this budget sends: a change that its codec encodes."""
    codec = context.update_codec(context.network, architecture, budget)
    changes = {name: np.ones(shape, np.float32) for name, shape in context.network.shapes(architecture).items()}
    exact = {name for name, decl in context.network.tensors.items() if decl.role in BUFFER_ROLES}
    encoded = encode_changes(codec, changes, exact=exact, uniform=lambda name: np.zeros)
    return sum(array.nbytes for array in encoded.values())
