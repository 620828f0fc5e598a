"""Networks that clients bring: what is accepted, whose round it is, and a union that grows while a run goes on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from matrices import mostly_long
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    perform_searches,
    profile,
    select_requests,
    telemetry,
)
from server.random_cases import reload_state
from server.server_rig import MODEL, World, config, fleet

from subfleet.elastic import replication
from subfleet.elastic import unions as elastic_unions
from subfleet.elastic.families import AnyFamily
from subfleet.elastic.network import Network
from subfleet.methods import AnyMethod
from subfleet.methods.clustered import Clustered
from subfleet.methods.fedadp import FedADP
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.run_networks import BeginContext
from subfleet.methods.sizes import SLICES
from subfleet.methods.standalone import Standalone
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.messages import Ack, Presence
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import canonical_json, to_plain
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.networks import NOT_YET, choose_networks, list_new_networks
from subfleet.rounds.offers import MOST_NETWORKS
from subfleet.rounds.progress import Measuring
from subfleet.rounds.signals import Reply, RequestDone, RequestFailed, Tick
from subfleet.rounds.state import RunState
from subfleet.rounds.work import NetworksRequest
from subfleet.settings.named_networks import parse_client_network
from subfleet.settings.sections import Evaluations
from subfleet.transport.in_memory import Faults

SMALL = replace(MODEL, widths=(4,), depths=(1,), norm="none")
DEEP = replace(SMALL, depths=(2,))
WIDE = replace(SMALL, widths=(8,))
METHODS: tuple[AnyMethod, ...] = (
    FedADP(choice="declared"),
    FedADP(choice="declared", merge="paper", absent="identity"),
    FlexiFed(choice="declared"),
    FlexiFed(choice="declared", sharing="clustered"),
    Clustered(choice="declared"),
    Standalone(choice="declared"),
)
CONTEXT = context_of(rounds=3, method=METHODS[0])


def told(family: AnyFamily) -> str:
    return canonical_json(family).decode()


def declared(context: RunContext, *families: AnyFamily | None) -> RunState:
    """Round 1 is announced to clients that bring these."""
    state = measuring(context)
    for name, family in zip(CLIENTS, families, strict=False):
        state, _ = step(context, state, replace(profile(name), network="" if family is None else told(family)), 1.0)
    return state


def measured(context: RunContext, state: RunState, *names: str) -> RunState:
    for name in names:
        state, actions = step(context, state, telemetry(context, name, state.round), 2.0)
        state, _ = perform_searches(context, state, actions, 2.0)
    return state


def ack(context: RunContext, text: str) -> Ack:
    event = replace(profile("ada"), network=text, message_id="p")
    (found,) = [one.ack for one in step(context, measuring(context), event, 1.0)[1] if isinstance(one, Reply)]
    return found


def test_a_network_is_accepted_before_there_is_a_union() -> None:
    assert (ack(CONTEXT, told(SMALL)).status, ack(CONTEXT, told(SMALL)).problem) == ("accepted", None)
    told_in_part = '{"family": "mlp", "widths": [4], "depths": [1]}'
    assert ack(CONTEXT, told_in_part).status == "accepted", "inputs and classes are the run's"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "none such"}, "none such"),
        ({"widths": []}, "widths is empty, but must have 1 or more"),
        ({"widths": [10**9]}, "a number above 65536"),
        (
            {
                "family": "vgg",
                "input_shape": [1, 9, 9],
                "kernels": [65535],
                **dict.fromkeys(("hidden_widths", "stem_width", "learnable_steps")),
            },
            "kernels of 65535, but may have 256 at most",
        ),
        ({"depths": [5000]}, "5000 blocks, but may have 128 at most"),
        ({"input_shape": [1, 9, 9]}, r"input_shape \(1, 9, 9\), but the run's is"),
        ({"class_count": 7}, "class_count 7, but the run's is"),
        ({"layers": 3}, "layers"),
        ({"family": None, "preset": "none such"}, "none such"),
    ],
)
def test_what_is_no_network_of_the_run_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    plain = {key: one for key, one in {**to_plain(SMALL), **changes}.items() if one is not None}
    with pytest.raises(ConfigError, match=words):
        parse_client_network(json.dumps(plain), MODEL)
    found = ack(CONTEXT, json.dumps(plain))
    assert (found.status, found.problem) == ("refused", "no_network")
    assert found.reason.startswith("its declared network is invalid: ")


@pytest.mark.parametrize("text", ["[]", "{", "null", '{"widths": NaN}'])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    assert ack(CONTEXT, text).problem == "no_network"


def test_a_method_that_goes_by_no_declarations_says_so() -> None:
    assert ack(context_of(rounds=3), told(SMALL)).problem == "not_used"


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_everyone_is_given_the_network_that_it_brings(method: AnyMethod) -> None:
    context = context_of(rounds=3, method=method)
    state = measured(context, declared(context, SMALL, DEEP, WIDE), *CLIENTS)
    assert [(one.id, one.living) for one in state.lineages] == [("", False), ("union1", True)]
    union = state.lineages[-1]
    assert union.config == replace(SMALL, widths=(8,), depths=(2,))
    members = context.declared(union).members
    assert [state.clients[name].size for name in CLIENTS] == [members[one] for one in (SMALL, DEEP, WIDE)]
    names = [size.name for size in members.values()]
    assert [name.rsplit(" ", 1)[0] for name in names] == ["union1 mlp d1", "union1 mlp d2", "union1 mlp d1"]


def test_unions_are_made_beside_the_loop_and_count_once() -> None:
    """No step builds a network; a round in which they cannot be made is tried again."""
    state = declared(CONTEXT, SMALL, DEEP, WIDE)
    for name in CLIENTS[:-1]:
        state, _ = step(CONTEXT, state, telemetry(CONTEXT, name), 2.0)
    state, actions = step(CONTEXT, state, telemetry(CONTEXT, CLIENTS[-1]), 2.0)
    (wanted,) = select_requests(NetworksRequest, actions)
    assert (state.phase, state.lineages) == ("measure", ())
    assert not select_requests(NetworksRequest, step(CONTEXT, state, Tick(), 3.0)[1]), "it is being made"
    made = choose_networks(CONTEXT, state)
    begun, _ = step(CONTEXT, state, RequestDone(request=wanted, result=made), 3.0)
    assert (begun.phase, begun.lineages) == ("train", made)
    again, _ = step(CONTEXT, begun, RequestDone(request=wanted, result=()), 3.0)
    assert again.lineages == made
    lost, _ = step(CONTEXT, state, RequestFailed(request=wanted, reason="no"), 3.0)
    assert (lost.lineages, lost.failed_attempts.count) == ((), 1), "nobody has a network that is trained"
    late, _ = step(CONTEXT, state, Tick(), 1e9)
    assert (late.lineages, late.failed_attempts.count) == ((), 1)


def test_who_brings_nothing_and_who_declares_a_submodel_of_a_model_that_is_not_trained_are_left_out() -> None:
    state = declared(CONTEXT, SMALL, None)
    state, _ = step(CONTEXT, state, replace(profile("cyd"), architecture=CONTEXT.space[0]), 1.0)
    state = measured(CONTEXT, state, *CLIENTS)
    assert state.clients["bob"].reason.startswith("the method needs declared architectures")
    assert state.clients["cyd"].reason == "it has declared no architecture"
    assert (state.clients["ada"].stage, state.clients["cyd"].stage) == ("preparing", "skipped")


def test_who_comes_with_another_network_waits_for_the_end_of_the_round() -> None:
    state = measured(CONTEXT, declared(CONTEXT, SMALL, SMALL, None), *CLIENTS)
    state = replace(state, at=Measuring(), clients={}, round=2, aggregated_round=1)
    for name, family in zip(CLIENTS, (SMALL, WIDE, WIDE), strict=True):
        state, _ = step(CONTEXT, state, replace(profile(name), network=told(family)), 3.0)
    state = measured(CONTEXT, state, *CLIENTS)
    assert [state.clients[name].reason for name in CLIENTS] == ["", NOT_YET, NOT_YET]
    assert list_new_networks(CONTEXT, state) == (WIDE,), "once, however many bring it"


def played(folder: Path, method: AnyMethod, faults: Faults | None = None, *, kill: bool = False) -> World:
    """The third device is there from the second round on, and brings more than the others."""
    devices = fleet()
    for name, family in zip(CLIENTS, (SMALL, DEEP, WIDE), strict=True):
        devices[name] = replace(devices[name], network=told(family), held_out_count=5)
    devices["cyd"] = replace(
        devices["cyd"], reading=lambda number: Reading(memory_free_bytes=10**9, available=number > 1)
    )
    settings = config(method=method, rounds=4, deploy_targets=("onnx",), evaluation=Evaluations(every=1))
    world = World(folder, settings, devices, faults=faults)
    if kill:
        for number in (1, 2, 3):

            def training(number: int = number) -> bool:
                state = world.server.state
                return state.round == number and any(client.stage == "out" for client in state.clients.values())

            world.run(training)
            world.kill_server()
    world.run()
    return world


@pytest.mark.slow
@pytest.mark.parametrize("method", mostly_long(METHODS, METHODS[0], METHODS[3]), ids=repr)
def test_a_union_grows_with_who_comes_whatever_is_lost_and_whoever_dies(method: AnyMethod, tmp_path: Path) -> None:
    calm = played(tmp_path / "calm", method)
    states = [{row.client_id: row.status for row in record.clients} for record in calm.notes.records]
    assert states[0]["cyd"].startswith("skipped: the device is not available")
    assert states[1] == states[2] == states[3] == dict.fromkeys(CLIENTS, "aggregated"), "it was heard in round 1"
    lineages = calm.server.state.lineages
    assert [(one.id, one.retired_round) for one in lineages] == [("", 0), ("union1", 1), ("union2", None)]
    assert lineages[-1].parent == "union1"
    sizes = {row.client_id: row.architecture_id for row in calm.notes.records[-1].clients}
    own = context_of(method=method).declared(lineages[-1]).members
    assert sizes == {name: own[one].architecture_id for name, one in zip(CLIENTS, (SMALL, DEEP, WIDE), strict=True)}
    rough = played(tmp_path / "rough", method, Faults(seed=3, loss=0.2, double=0.2, delay_s=1.5), kill=True)
    assert rough.model_bytes() == calm.model_bytes()


def test_a_member_may_declare_so_many_networks_and_no_more_even_if_it_leaves_in_between() -> None:
    state = declared(CONTEXT, *(replace(SMALL, widths=(4 * count,)) for count in (1, 2, 3)))
    for number, width in enumerate((4, 8, 12, 16, 20), start=1):
        told_now = replace(profile("eve"), network=told(replace(SMALL, widths=(width,))), message_id=f"p{number}")
        state, actions = step(CONTEXT, state, told_now, 1.0)
        (answer,) = [one.ack for one in actions if isinstance(one, Reply)]
        assert answer.problem == ("too_many" if number > MOST_NETWORKS else None)
        assert ("but may declare only 4" in answer.reason) == (number > MOST_NETWORKS)
        before = reload_state(state, 1.0)
        state, _ = step(CONTEXT, before, Presence(client_id="eve", session_id=f"eve-{number}", online=True), 1.0)
        state, _ = step(CONTEXT, state, told_now, 1.0)
        state, _ = step(CONTEXT, state, telemetry(CONTEXT, "eve", max(state.round, 1), attempt=state.attempt), 2.0)
        assert (state.clients["eve"].offer.brought is None) == (number > MOST_NETWORKS)
        state = replace(
            state, clients=MappingProxyType({}), live=replace(state.live, members=state.live.members.without({"eve"}))
        )
    assert len(state.brought["eve"]) == MOST_NETWORKS


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("changes", [{"widths": (65_536,)}, {"widths": (9000,), "depths": (4,)}], ids=str)
def test_what_is_too_large_is_in_no_union_and_leaves_the_others_theirs(
    method: AnyMethod, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it is built, nor is anything as long as it is wide."""
    for module in (replication, elastic_unions):
        monkeypatch.setattr(module, "size_in", within(replication.size_in))
    context = context_of(rounds=3, method=method)
    state = measured(context, declared(context, SMALL, DEEP, replace(SMALL, **changes)), *CLIENTS)
    (_, union) = state.lineages
    assert set(union.members) == {SMALL, DEEP}
    assert state.clients["cyd"].stage == "skipped"
    assert {state.clients[name].stage for name in ("ada", "bob")} == {"preparing"}


@pytest.mark.parametrize("others", [2, 5])
@pytest.mark.parametrize(("width", "far"), [(16, False), (32, True)])  # of 8.5 and 29 times the parameters
def test_one_far_larger_than_the_median_is_in_no_union_whose_width_others_are_copied_to(
    others: int, width: int, far: bool
) -> None:
    """One member alone does not make the union by which FedADP copies all others; of few nobody tells who is far."""
    large = replace(SMALL, widths=(width,))
    for method in METHODS:
        begin = method.roles().networks.begin
        assert begin is not None
        brought = MappingProxyType({**{f"c{place}": SMALL for place in range(others)}, "eve": large})
        beginning = BeginContext(
            network=CONTEXT.network, rates=(1.0,), clients=tuple(brought), carried_by=lambda _: (), brought=brought
        )
        (union,) = begin(beginning)
        left_out = far and others == 5 and isinstance(method, FedADP)
        assert (large in union.members) == (not left_out)
        assert SMALL in union.members


def within(size_in: Callable[[Network, Network], Architecture]) -> Callable[[Network, Network], Architecture]:
    def looked_at(network: Network, part: Network) -> Architecture:
        assert (
            max(network.parameter_count(network.full_architecture()), part.parameter_count(part.full_architecture()))
            < 10**6
        )
        return size_in(network, part)

    return looked_at


def test_unions_in_use_have_room_together() -> None:
    """Networks of families that have no union with each other each ask for one."""
    many = [
        replace(SMALL, group_size=1, norm="none", input_shape=(6,), class_count=classes) for classes in range(2, 40)
    ]
    groups = SLICES.add_to((), many)
    assert len(groups) == 8
    large = [replace(SMALL, widths=(4500,), class_count=classes) for classes in range(3, 8)]
    assert len(SLICES.add_to((), large)) == 2
    small = [replace(SMALL, class_count=2), replace(SMALL, class_count=9)]
    found = SLICES.add_to((), [replace(large[0], widths=(9000,)), *large, *small])
    assert {*small} < {one for group in found for one in group.members}, (
        "who brings a large one takes no room of theirs"
    )


def test_who_brings_large_networks_leaves_room_for_whoever_comes_later() -> None:
    """However many come first, one after the other: the next takes half of what they leave at most."""
    groups: list[Any] = []
    for width in range(4900, 100, -100):
        groups = SLICES.add_to(groups, [replace(SMALL, widths=(width,), class_count=3 + width % 7)])
    assert len(groups) == 7
    later = [replace(SMALL, class_count=2), replace(SMALL, class_count=11)]
    taken = {one for group in SLICES.add_to(groups, later[:1]) for one in group.members}
    assert later[0] in taken
