"""A device that gets no task is told the reason, however many messages are lost."""

from dataclasses import replace
from pathlib import Path

import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    prepared,
    profile,
    task_failed,
    telemetry,
    training,
)
from server.fake_device import Behaviour
from server.server_rig import World, config, fleet

from subfleet.protocol.messages import Ack, Presence
from subfleet.protocol.readings import Reading
from subfleet.rounds.coordinator import step
from subfleet.rounds.signals import Action, Reply
from subfleet.transport.in_memory import Faults

PLAN = context_of()
LITTLE = 10


def notices(actions: tuple[Action, ...]) -> dict[str, Ack]:
    """The acks that tell clients why they get no task."""
    replies = [action for action in actions if isinstance(action, Reply)]
    return {reply.client_id: reply.ack for reply in replies if reply.ack.reason and reply.ack.status == "accepted"}


def test_a_skipped_client_is_told_at_once_and_with_every_heartbeat_of_the_round() -> None:
    state = measuring(PLAN)
    poor = replace(telemetry(PLAN, "ada", memory_bytes=LITTLE), message_id="its telemetry")
    state, actions = step(PLAN, state, poor, 2.0)
    assert notices(actions) == {}
    for name in CLIENTS[1:]:
        state, actions = step(PLAN, state, telemetry(PLAN, name), 2.0)
    acks = notices(actions)
    assert acks.keys() == {"ada"}
    assert acks["ada"].of == "its telemetry"
    assert acks["ada"].reason.startswith("no submodel fits: the smallest needs")
    for name in CLIENTS:
        alive = Presence(client_id=name, session_id=f"{name}-1", online=True)
        assert notices(step(PLAN, state, alive, 3.0)[1]) == ({"ada": acks["ada"]} if name == "ada" else {})


def test_a_device_that_can_take_no_part_at_all_is_told_with_its_ack() -> None:
    state = measuring(PLAN)
    away = replace(telemetry(PLAN, "ada"), reading=Reading(available=False))
    _, actions = step(PLAN, state, away, 2.0)
    assert notices(actions)["ada"].reason == "the device is not available now"


def test_a_failed_program_is_told_and_a_client_with_a_task_is_told_nothing() -> None:
    state = measuring(PLAN)
    for name in CLIENTS:
        state, _ = step(PLAN, state, telemetry(PLAN, name), 2.0)
    state, actions = step(PLAN, state, prepared(PLAN, state, "bob"), 2.0)
    assert notices(actions) == {}
    failed = task_failed(state, "ada")
    assert notices(step(PLAN, state, failed, 2.0)[1])["ada"].reason == "export failed: no"
    assert profile("bob").client_id in training(PLAN).clients


def test_all_clients_are_told_in_an_attempt_that_leaves_nothing_to_aggregate() -> None:
    state = measuring(PLAN)
    acks: dict[str, Ack] = {}
    for name in CLIENTS:
        state, actions = step(PLAN, state, telemetry(PLAN, name, memory_bytes=LITTLE), 2.0)
        acks |= notices(actions)
    assert (state.phase, state.attempt) == ("measure", 1)
    assert acks.keys() == set(CLIENTS)


@pytest.mark.slow
def test_on_a_link_that_loses_half_of_all_messages_a_skipped_device_hears_why(tmp_path: Path) -> None:
    devices = {**fleet(), "dot": Behaviour(memory_budget_bytes=lambda _: LITTLE)}
    for seed in range(3):
        faults = Faults(seed=seed, loss=0.5)
        world = World(tmp_path / str(seed), config(min_clients=4), devices, faults=faults)
        heard = world.devices["dot"].acks
        world.run(until=lambda heard=heard: any(ack.reason for ack in heard.values()))  # type: ignore[misc]  # bound now
        assert world.server.state.round == 1
        (ack,) = [ack for ack in heard.values() if ack.reason]
        assert ack.reason.startswith("no submodel fits: the smallest needs")
