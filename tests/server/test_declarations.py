"""Architectures that devices declare: acceptance, refusal with a reason, and training."""

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


def announce(context: RunContext, *sizes: Architecture | None) -> RunState:
    """Announce round 1 to clients that have declared these architectures."""
    state = measuring(context)
    for name, size in zip(CLIENTS, sizes, strict=False):
        state, _ = step(context, state, replace(profile(name), architecture=size), 1.0)
    return state


def assign_sizes(context: RunContext, state: RunState, memory_bytes: int = PLENTY_BYTES) -> RunState:
    for name in CLIENTS:
        state, actions = step(context, state, telemetry(context, name, 1, memory_bytes), 2.0)
        state, _ = perform_searches(context, state, actions, 2.0)
    assert state.phase == "train"
    return state


def list_acks(context: RunContext, state: RunState, size: Architecture | None) -> list[Ack]:
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
def test_an_architecture_that_cannot_be_trained_is_refused_with_a_kind_and_a_reason(
    changes: dict[str, Any], problem: str, words: str
) -> None:
    wrong = Architecture(**{"blocks": PLAN.network.full_architecture().blocks, **changes})
    (ack,) = list_acks(PLAN, measuring(PLAN), wrong)
    assert (ack.of, ack.status, ack.problem) == ("p", "refused", problem)
    assert ack.reason == judge_declaration(PLAN, replace(profile("ada"), architecture=wrong)).reason
    assert re.search(words, ack.reason)
    client = assign_sizes(PLAN, announce(PLAN, wrong, SMALL, SMALL)).clients["ada"]
    assert (client.stage, client.reason, client.size) == ("skipped", ack.reason, None)


@pytest.mark.parametrize("size", PLAN.space, ids=lambda size: size.name)
def test_every_size_of_the_space_is_accepted_in_any_notation(size: Architecture) -> None:
    whole = tuple((name, Full()) for name in PLAN.network.axes if name not in dict(size.axes))
    rolled = tuple(
        (name, Roll(start=0, size=selection.size)) for name, selection in size.axes if isinstance(selection, Prefix)
    )
    rephrased = replace(size, axes=tuple(sorted((*rolled, *whole))), name="mine")
    sizes = [
        judge_declaration(PLAN, replace(profile("ada"), architecture=declaration)).size
        for declaration in (rephrased, size)
    ]
    assert sizes == [size, size]
    (ack,) = list_acks(PLAN, measuring(PLAN), rephrased)
    assert (ack.status, ack.problem, ack.reason) == ("accepted", None, "")


def test_every_profile_with_a_declaration_is_answered() -> None:
    state = measuring(PLAN)
    for _ in range(2):
        answers = list_acks(PLAN, state, SMALL)
        assert [(ack.of, ack.status, ack.message_id) for ack in answers] == [("p", "accepted", "ack/p")]
        state, _ = step(PLAN, state, replace(profile("ada"), architecture=SMALL, message_id="p"), 1.0)
    assert list_acks(PLAN, state, None) == []


def test_a_method_that_uses_no_declarations_refuses_them_and_assigns_what_fits() -> None:
    context = context_of(rounds=3)
    (ack,) = list_acks(context, measuring(context), SMALL)
    assert (ack.status, ack.problem) == ("refused", "not_used")
    assert ack.reason == "the run's method 'heterofl' uses no declarations and assigns what fits"
    state = assign_sizes(context, announce(context, SMALL))
    assert {client.size for client in state.clients.values()} == {context.space[-1]}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.TYPE)
def test_each_client_is_assigned_its_declaration_and_left_out_without_one(method: AnyMethod) -> None:
    context = context_of(rounds=3, method=method)
    state = assign_sizes(context, announce(context, context.space[1], context.space[-1]))
    assert [state.clients[name].size for name in CLIENTS] == [context.space[1], context.space[-1], None]
    assert state.clients["cyd"].reason == (
        "the method needs declared architectures, but the device declares none; declare one with --architecture, or in "
        "its profile"
    )


def test_a_declaration_that_does_not_fit_is_left_out_and_never_shrunk() -> None:
    largest = PLAN.first.candidates[-1]
    need_bytes = largest.training_memory_bytes["onnx"]
    state = assign_sizes(PLAN, announce(PLAN, largest.architecture, PLAN.space[0], PLAN.space[0]), need_bytes - 1)
    client = state.clients["ada"]
    assert (client.stage, client.size) == ("skipped", None)
    assert client.reason == (
        f"its declared architecture, {largest.architecture.name!r}, needs {need_bytes} bytes of memory and the budget "
        f"is {need_bytes - 1}"
    )
    assert state.clients["bob"].size == PLAN.space[0]


def test_a_program_that_plans_too_much_leaves_the_device_out_with_the_reason() -> None:
    state = assign_sizes(PLAN, announce(PLAN, PLAN.space[-1], PLAN.space[0], PLAN.space[0]))
    state, actions = step(PLAN, state, prepared(PLAN, state, "ada", planned_peak_bytes=PLENTY_BYTES + 1), 2.0)
    assert not select_requests(TaskRequest, actions)
    assert not any(isinstance(action, SendTask) for action in actions)
    assert state.clients["ada"].reason == (
        f"its declared architecture, {PLAN.space[-1].name!r}, needs more memory than the budget of {PLENTY_BYTES}, "
        "according to its program"
    )


@pytest.mark.parametrize("reason", ["memory", "runtime"])
def test_a_refused_declaration_is_final_in_its_round(reason: Any) -> None:
    state = assign_sizes(PLAN, announce(PLAN, PLAN.space[-1], PLAN.space[0], PLAN.space[0]))
    state, _ = step(PLAN, state, prepared(PLAN, state, "ada"), 2.0)
    answer = replace(refusal(PLAN, state, "ada", 1000), reason=reason)
    state, actions = step(PLAN, state, answer, 3.0)
    assert not select_requests(TaskRequest, actions)
    assert (state.clients["ada"].stage, state.clients["ada"].reason) == ("refused", f"{reason}: as told")


def test_a_new_declaration_counts_from_the_next_announcement_on() -> None:
    state = announce(PLAN, PLAN.space[0], PLAN.space[0], PLAN.space[0])
    state, _ = step(PLAN, state, telemetry(PLAN, "ada"), 2.0)
    redeclared = replace(profile("ada"), architecture=PLAN.space[-1])
    state, _ = step(PLAN, state, redeclared, 2.0)
    for name in CLIENTS[1:]:
        state, actions = step(PLAN, state, telemetry(PLAN, name), 2.0)
        state, _ = perform_searches(PLAN, state, actions, 2.0)
    assert state.clients["ada"].size == PLAN.space[0], "the declaration at the announcement counts"


def play_run(folder: Path, faults: Faults | None = None, *, kill: bool = False) -> World:
    """Play a run in which the third device declares an unknown architecture."""
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
def test_declarations_are_trained_whatever_is_lost_and_whoever_dies(tmp_path: Path) -> None:
    calm = play_run(tmp_path / "calm")
    for record in calm.notes.records:
        ada, bob, cyd = record.clients
        assert [(row.architecture_id, row.status) for row in (ada, bob)] == [
            (SMALL.architecture_id, "aggregated"),
            (PLAN.space[-1].architecture_id, "aggregated"),
        ]
        assert cyd.status.startswith("skipped: a submodel names the axis 'width', but the network has")
    assert {task.architecture.architecture_id for task in calm.devices["ada"].tasks} == {SMALL.architecture_id}
    answers = {name: device.acks[f"profile.{name}-1"] for name, device in calm.devices.items()}
    assert {name: (ack.status, ack.problem) for name, ack in answers.items()} == {
        "ada": ("accepted", None),
        "bob": ("accepted", None),
        "cyd": ("refused", "unknown_axis"),
    }
    rough = play_run(tmp_path / "rough", Faults(seed=3, loss=0.2, double=0.2, delay_s=1.5), kill=True)
    assert rough.model_bytes() == calm.model_bytes()
