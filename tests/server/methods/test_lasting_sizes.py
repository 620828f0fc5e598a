"""Sizes that clients keep in all rounds, chosen by the room in their memory logs."""

from dataclasses import replace

import pytest

from subfleet.methods import AnyMethod
from subfleet.methods.fedfa import FedFA
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.standalone import Standalone
from subfleet.protocol.readings import Budget
from subfleet.testing.rounds import make_assignee, make_context

FIXED = pytest.mark.parametrize("method", [FedFA(), FlexiFed(), Standalone()], ids=lambda method: method.TYPE)


@FIXED
def test_a_lasting_size_depends_on_the_log_and_not_on_the_first_reading(method: AnyMethod) -> None:
    context = make_context(method)
    assign, needs = (
        context.roles.assigner.assign,
        [candidate.training_memory_bytes["onnx"] for candidate in context.first.candidates],
    )
    middle = Budget(memory_bytes=sorted(needs)[len(needs) // 2])
    middle_size = assign(make_assignee(context, "a", memory_bytes=middle.memory_bytes)).candidate
    assert middle_size is not None
    assert middle_size != context.first.candidates[-1]
    # More memory gives no larger size; with less, the client is skipped and keeps its size for later.
    rich = replace(make_assignee(context, "a"), lasting=middle)
    poor = replace(make_assignee(context, "a", memory_bytes=needs[0]), lasting=middle)
    assert assign(rich).candidate == middle_size
    assert (assign(poor).candidate, assign(poor).only) == (None, middle_size)
    assert "the size that fits its log" in assign(poor).reason
    # A client whose log has room for nothing gets the smallest size, whenever that fits.
    bare = Budget(memory_bytes=0)
    assert assign(replace(rich, lasting=bare)).candidate == context.first.candidates[0]
    # A client keeps its size whatever its log says later; without a log, the first reading decides.
    assert (
        assign(replace(rich, previous=context.first.candidates[0].architecture)).candidate
        == context.first.candidates[0]
    )
    assert assign(make_assignee(context, "a")).candidate == context.first.candidates[-1]


@FIXED
def test_a_program_that_plans_more_than_its_estimate_leads_to_a_smaller_lasting_size(method: AnyMethod) -> None:
    context = make_context(method)
    first = context.roles.assigner.assign(
        replace(make_assignee(context, "a"), lasting=Budget(memory_bytes=2**40))
    ).candidate
    assert first is not None
    below = replace(make_assignee(context, "a"), lasting=Budget(memory_bytes=2**40), below=first)
    second = context.roles.assigner.assign(below).candidate
    assert second is not None
    assert second.order < first.order


def test_fedfa_scores_a_size_only_if_its_weights_fit_beside_those_of_the_largest() -> None:
    context = make_context(FedFA(choice="score", proposals=2))
    propose = context.roles.assigner.propose
    assert propose is not None
    drawn, largest = propose(make_assignee(context, "a"))
    just_bytes = 2 * largest.weight_bytes + drawn.weight_bytes
    for short, expected in ((0, (drawn, largest)), (1, (largest,))):
        budget = Budget(memory_bytes=2**40, downlink_bytes=just_bytes - short)
        assert propose(replace(make_assignee(context, "a"), budget=budget)) == expected


def test_fedfa_scores_only_sizes_that_the_log_has_room_for() -> None:
    context = make_context(FedFA(choice="score", proposals=16))
    propose = context.roles.assigner.propose
    assert propose is not None
    middle = context.first.candidates[len(context.first.candidates) // 2]
    lasting = Budget(memory_bytes=middle.training_memory_bytes["onnx"])
    proposed = propose(replace(make_assignee(context, "a"), lasting=lasting))
    assert len(proposed) > 1
    assert all(candidate.training_memory_bytes["onnx"] <= lasting.memory_bytes for candidate in proposed)
    assert context.first.candidates[-1] in propose(make_assignee(context, "a"))
