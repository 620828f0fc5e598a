"""Architectures that devices declare: what is accepted, what is refused and why, and what is then trained."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    perform_searches,
    prepared,
    profile,
    refusal,
    select_requests,
    telemetry,
)
from server.fake_device import PLENTY_BYTES
from server.server_rig import World, config, fleet

from subfleet.methods import AnyMethod
from subfleet.methods.fedfa import FedFA
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.standalone import Standalone
from subfleet.protocol.messages import Ack
from subfleet.protocol.submodel import Architecture, Explicit, Full, Prefix, Roll
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.offers import judge_declaration
from subfleet.rounds.signals import Reply, SendTask
from subfleet.rounds.state import RunState
from subfleet.rounds.work import TaskRequest
from subfleet.transport.in_memory import Faults

METHODS: tuple[AnyMethod, ...] = (FlexiFed(choice="declared"), Standalone(choice="declared"), FedFA(choice="declared"))
PLAN = context_of(rounds=3, method=METHODS[0])
SMALL = next(size for size in PLAN.space if size.axes and size.blocks)
AXES = dict(SMALL.axes)
AXIS, LENGTH = next((name, PLAN.network.axes[name].size) for name in AXES)


def declared(context: RunContext, *sizes: Architecture | None) -> RunState:
    """Round 1 is announced to clients that have declared these architectures."""
    state = measuring(context)
    for name, size in zip(CLIENTS, sizes, strict=False):
        state, _ = step(context, state, replace(profile(name), architecture=size), 1.0)
    return state


def assigned(context: RunContext, state: RunState, memory_bytes: int = PLENTY_BYTES) -> RunState:
    for name in CLIENTS:
        state, actions = step(context, state, telemetry(context, name, 1, memory_bytes), 2.0)
        state, _ = perform_searches(context, state, actions, 2.0)
    assert state.phase == "train"
    return state


def acks(context: RunContext, state: RunState, size: Architecture | None) -> list[Ack]:
    event = replace(profile("ada"), architecture=size, message_id="p")
    return [action.ack for action in step(context, state, event, 1.0)[1] if isinstance(action, Reply)]


@pytest.mark.parametrize(
    ("changes", "problem", "words"),
    [
        ({"axes": (("width", Prefix(size=4)),)}, "unknown_axis", "names the axis 'width', but the network has"),
        ({"axes": ((AXIS, Prefix(size=LENGTH + 4)),)}, "too_large", f"keeps {LENGTH + 4} of axis .* only {LENGTH}"),
        ({"axes": ((AXIS, Explicit(indices=(0, LENGTH))),)}, "too_large", "beyond its size"),
        ({"axes": ((AXIS, Roll(start=LENGTH, size=4)),)}, "too_large", "beyond its size"),
        ({"axes": ((AXIS, Prefix(size=2**62)),)}, "too_large", "has only"),
        ({"blocks": ("no such block",)}, "unknown_block", "keeps the blocks"),
        ({"choices": (("operator", ("conv",)),)}, "unknown_block", "has no choices"),
        ({"axes": ((AXIS, Prefix(size=3)),)}, "not_in_space", "whole aligned groups of 4"),
        ({"axes": SMALL.axes[:1], "blocks": ()}, "not_in_space", "not one of the .* sizes of the run, from 'w1/2 d"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_kind_and_a_sentence(
    changes: dict[str, Any], problem: str, words: str
) -> None:
    wrong = Architecture(**{"blocks": PLAN.network.full_architecture().blocks, **changes})
    (ack,) = acks(PLAN, measuring(PLAN), wrong)
    assert (ack.of, ack.status, ack.problem) == ("p", "refused", problem)
    assert ack.reason == judge_declaration(PLAN, replace(profile("ada"), architecture=wrong)).reason
    assert re.search(words, ack.reason)
    client = assigned(PLAN, declared(PLAN, wrong, SMALL, SMALL)).clients["ada"]
    assert (client.stage, client.reason, client.size) == ("skipped", ack.reason, None)


@pytest.mark.parametrize("size", PLAN.space, ids=lambda size: size.name)
def test_every_size_of_the_space_is_accepted_in_whatever_words(size: Architecture) -> None:
    whole = tuple((name, Full()) for name in PLAN.network.axes if name not in dict(size.axes))
    rolled = tuple((name, Roll(start=0, size=kept.size)) for name, kept in size.axes if isinstance(kept, Prefix))
    said = replace(size, axes=tuple(sorted((*rolled, *whole))), name="mine")
    found = [judge_declaration(PLAN, replace(profile("ada"), architecture=one)).size for one in (said, size)]
    assert found == [size, size]
    (ack,) = acks(PLAN, measuring(PLAN), said)
    assert (ack.status, ack.problem, ack.reason) == ("accepted", None, "")


def test_each_profile_is_answered_as_answers_may_be_lost_and_one_without_a_declaration_is_not() -> None:
    state = measuring(PLAN)
    for _ in range(2):
        answers = acks(PLAN, state, SMALL)
        assert [(one.of, one.status, one.message_id) for one in answers] == [("p", "accepted", "ack/p")]
        state, _ = step(PLAN, state, replace(profile("ada"), architecture=SMALL, message_id="p"), 1.0)
    assert acks(PLAN, state, None) == []


def test_a_method_that_goes_by_no_declarations_says_so_and_gives_what_fits() -> None:
    context = context_of(rounds=3)
    (ack,) = acks(context, measuring(context), SMALL)
    assert (ack.status, ack.problem) == ("refused", "not_used")
    assert ack.reason == "the run's method 'heterofl' uses no declarations and assigns what fits"
    state = assigned(context, declared(context, SMALL))
    assert {client.size for client in state.clients.values()} == {context.space[-1]}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.TYPE)
def test_everyone_is_given_what_it_declares_and_who_declares_nothing_is_left_out(method: AnyMethod) -> None:
    context = context_of(rounds=3, method=method)
    state = assigned(context, declared(context, context.space[1], context.space[-1]))
    assert [state.clients[name].size for name in CLIENTS] == [context.space[1], context.space[-1], None]
    assert state.clients["cyd"].reason == (
        "the method needs declared architectures, but the device declares none; declare one with --architecture, or in "
        "its profile"
    )


def test_what_does_not_fit_now_is_left_out_and_never_shrunk() -> None:
    largest = PLAN.first.candidates[-1]
    need_bytes = largest.training_memory_bytes["onnx"]
    state = assigned(PLAN, declared(PLAN, largest.architecture, PLAN.space[0], PLAN.space[0]), need_bytes - 1)
    client = state.clients["ada"]
    assert (client.stage, client.size) == ("skipped", None)
    assert client.reason == (
        f"its declared architecture, {largest.architecture.name!r}, needs {need_bytes} bytes of memory and the budget "
        f"is {need_bytes - 1}"
    )
    assert state.clients["bob"].size == PLAN.space[0]


def test_a_program_that_plans_too_much_leaves_the_device_out_with_the_reason() -> None:
    state = assigned(PLAN, declared(PLAN, PLAN.space[-1], PLAN.space[0], PLAN.space[0]))
    state, actions = step(PLAN, state, prepared(PLAN, state, "ada", planned_peak_bytes=PLENTY_BYTES + 1), 2.0)
    assert not select_requests(TaskRequest, actions)
    assert not any(isinstance(action, SendTask) for action in actions)
    assert state.clients["ada"].reason == (
        f"its declared architecture, {PLAN.space[-1].name!r}, needs more memory than the budget of {PLENTY_BYTES}, as "
        "its program says"
    )


@pytest.mark.parametrize("reason", ["memory", "runtime"])
def test_a_refusal_of_it_is_final_in_its_round(reason: Any) -> None:
    state = assigned(PLAN, declared(PLAN, PLAN.space[-1], PLAN.space[0], PLAN.space[0]))
    state, _ = step(PLAN, state, prepared(PLAN, state, "ada"), 2.0)
    answer = replace(refusal(PLAN, state, "ada", 1000), reason=reason)
    state, actions = step(PLAN, state, answer, 3.0)
    assert not select_requests(TaskRequest, actions)
    assert (state.clients["ada"].stage, state.clients["ada"].reason) == ("refused", f"{reason}: as told")


def test_one_that_is_declared_anew_counts_from_the_next_announcement_on() -> None:
    state = declared(PLAN, PLAN.space[0], PLAN.space[0], PLAN.space[0])
    state, _ = step(PLAN, state, telemetry(PLAN, "ada"), 2.0)
    anew = replace(profile("ada"), architecture=PLAN.space[-1])
    state, _ = step(PLAN, state, anew, 2.0)
    for name in CLIENTS[1:]:
        state, actions = step(PLAN, state, telemetry(PLAN, name), 2.0)
        state, _ = perform_searches(PLAN, state, actions, 2.0)
    assert state.clients["ada"].size == PLAN.space[0], "what it said before it was measured"


def played(folder: Path, faults: Faults | None = None, *, kill: bool = False) -> World:
    """The third device declares what no run has."""
    devices = fleet()
    wrong = Architecture(axes=(("width", Prefix(size=4)),))
    for name, size in zip(CLIENTS, (SMALL, PLAN.space[-1], wrong), strict=True):
        devices[name] = replace(devices[name], architecture=size)
    settings = config(method=METHODS[0], deploy_targets=())
    world = World(folder, settings, devices, faults=faults)
    if kill:
        world.run(lambda: any(client.stage == "out" for client in world.server.state.clients.values()))
        world.kill_server()
    world.run()
    return world


@pytest.mark.slow
def test_what_was_declared_is_what_is_trained_whatever_is_lost_and_whoever_dies(tmp_path: Path) -> None:
    calm = played(tmp_path / "calm")
    for record in calm.notes.records:
        ada, bob, cyd = record.clients
        assert [(row.architecture_id, row.status) for row in (ada, bob)] == [
            (SMALL.architecture_id, "aggregated"),
            (PLAN.space[-1].architecture_id, "aggregated"),
        ]
        assert cyd.status.startswith("skipped: a submodel names the axis 'width', but the network has")
    assert {task.architecture.architecture_id for task in calm.devices["ada"].tasks} == {SMALL.architecture_id}
    answers = {name: device.acks[f"profile.{name}-1"] for name, device in calm.devices.items()}
    assert {name: (one.status, one.problem) for name, one in answers.items()} == {
        "ada": ("accepted", None),
        "bob": ("accepted", None),
        "cyd": ("refused", "unknown_axis"),
    }
    rough = played(tmp_path / "rough", Faults(seed=3, loss=0.2, double=0.2, delay_s=1.5), kill=True)
    assert rough.model_bytes() == calm.model_bytes()
