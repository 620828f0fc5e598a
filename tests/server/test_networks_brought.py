"""Networks that clients declare: which are accepted, when they count, and a union that grows during a run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from declared import list_shapes
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


def encode_family(family: AnyFamily) -> str:
    return canonical_json(family).decode()


def declare_networks(context: RunContext, *families: AnyFamily | None) -> RunState:
    """Round 1 is announced to clients that declare these networks."""
    state = measuring(context)
    for name, family in zip(CLIENTS, families, strict=False):
        state, _ = step(
            context, state, replace(profile(name), network="" if family is None else encode_family(family)), 1.0
        )
    return state


def measure_clients(context: RunContext, state: RunState, *names: str) -> RunState:
    for name in names:
        state, actions = step(context, state, telemetry(context, name, state.round), 2.0)
        state, _ = perform_searches(context, state, actions, 2.0)
    return state


def ack(context: RunContext, text: str) -> Ack:
    event = replace(profile("ada"), network=text, message_id="p")
    (reply,) = [action.ack for action in step(context, measuring(context), event, 1.0)[1] if isinstance(action, Reply)]
    return reply


def test_a_network_is_accepted_before_there_is_a_union() -> None:
    assert (ack(CONTEXT, encode_family(SMALL)).status, ack(CONTEXT, encode_family(SMALL)).problem) == ("accepted", None)
    partial_text = '{"family": "mlp", "widths": [4], "depths": [1]}'
    assert ack(CONTEXT, partial_text).status == "accepted", "inputs and classes are the run's"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "none such"}, "none such"),
        ({"widths": []}, "widths is empty, but must have 1 or more"),
        ({"widths": [10**9]}, "a number above the limit of 65536"),
        (
            {
                "family": "vgg",
                "input_shape": [1, 9, 9],
                "kernels": [65535],
                **dict.fromkeys(("hidden_widths", "stem_width", "learnable_steps")),
            },
            "kernels of 65535, but may have at most 256",
        ),
        ({"depths": [5000]}, "5000 blocks, but may have at most 128"),
        ({"input_shape": [1, 9, 9]}, r"input_shape \(1, 9, 9\), but the run has"),
        ({"class_count": 7}, "class_count 7, but the run has"),
        ({"layers": 3}, "layers"),
        ({"family": None, "preset": "none such"}, "none such"),
    ],
)
def test_a_network_that_does_not_fit_the_run_is_refused_with_a_reason(changes: dict[str, Any], words: str) -> None:
    plain = {key: value for key, value in {**to_plain(SMALL), **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        parse_client_network(json.dumps(plain), MODEL)
    reply = ack(CONTEXT, json.dumps(plain))
    assert (reply.status, reply.problem) == ("refused", "no_network")
    assert reply.reason.startswith("its declared network is invalid: ")


@pytest.mark.parametrize("text", ["[]", "{", "null", '{"widths": NaN}'])
def test_a_text_without_a_json_object_is_refused(text: str) -> None:
    assert ack(CONTEXT, text).problem == "no_network"


def test_a_method_without_declarations_refuses_them() -> None:
    assert ack(context_of(rounds=3), encode_family(SMALL)).problem == "not_used"


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_client_is_assigned_the_network_that_it_declares(method: AnyMethod) -> None:
    context = context_of(rounds=3, method=method)
    state = measure_clients(context, declare_networks(context, SMALL, DEEP, WIDE), *CLIENTS)
    assert [(lineage.id, lineage.living) for lineage in state.lineages] == [("", False), ("union1", True)]
    union = state.lineages[-1]
    assert list_shapes(union.config) == list_shapes(replace(SMALL, widths=(8,), depths=(2,), hidden_widths=(8, 4)))
    members = context.get_declared(union).members
    assert [state.clients[name].size for name in CLIENTS] == [members[family] for family in (SMALL, DEEP, WIDE)]
    names = [size.name for size in members.values()]
    assert [name.rsplit(" ", 1)[0] for name in names] == ["union1 mlp d1", "union1 mlp d2", "union1 mlp d1"]


def test_unions_are_made_beside_the_loop_and_count_once() -> None:
    """No step builds a network; a round in which unions cannot be made is attempted again."""
    state = declare_networks(CONTEXT, SMALL, DEEP, WIDE)
    for name in CLIENTS[:-1]:
        state, _ = step(CONTEXT, state, telemetry(CONTEXT, name), 2.0)
    state, actions = step(CONTEXT, state, telemetry(CONTEXT, CLIENTS[-1]), 2.0)
    (request,) = select_requests(NetworksRequest, actions)
    assert (state.phase, state.lineages) == ("measure", ())
    assert not select_requests(NetworksRequest, step(CONTEXT, state, Tick(), 3.0)[1]), "it is being made"
    lineages = choose_networks(CONTEXT, state)
    begun, _ = step(CONTEXT, state, RequestDone(request=request, result=lineages), 3.0)
    assert (begun.phase, begun.lineages) == ("train", lineages)
    again, _ = step(CONTEXT, begun, RequestDone(request=request, result=()), 3.0)
    assert again.lineages == lineages
    lost, _ = step(CONTEXT, state, RequestFailed(request=request, reason="no"), 3.0)
    assert (lost.lineages, lost.failed_attempts.count) == ((), 1), "no client has a network to train"
    late, _ = step(CONTEXT, state, Tick(), 1e9)
    assert (late.lineages, late.failed_attempts.count) == ((), 1)


def test_clients_without_a_network_or_with_one_of_an_untrained_model_are_left_out() -> None:
    state = declare_networks(CONTEXT, SMALL, None)
    state, _ = step(CONTEXT, state, replace(profile("cyd"), architecture=CONTEXT.space[0]), 1.0)
    state = measure_clients(CONTEXT, state, *CLIENTS)
    assert state.clients["bob"].reason.startswith("the method needs declared architectures")
    assert state.clients["cyd"].reason == "it has declared no architecture"
    assert (state.clients["ada"].stage, state.clients["cyd"].stage) == ("preparing", "skipped")


def test_a_client_with_a_new_network_waits_for_the_end_of_the_round() -> None:
    state = measure_clients(CONTEXT, declare_networks(CONTEXT, SMALL, SMALL, None), *CLIENTS)
    state = replace(state, at=Measuring(), clients={}, round=2, aggregated_round=1)
    for name, family in zip(CLIENTS, (SMALL, WIDE, WIDE), strict=True):
        state, _ = step(CONTEXT, state, replace(profile(name), network=encode_family(family)), 3.0)
    state = measure_clients(CONTEXT, state, *CLIENTS)
    assert [state.clients[name].reason for name in CLIENTS] == ["", NOT_YET, NOT_YET]
    assert list_new_networks(CONTEXT, state) == (WIDE,), "once, however many clients declare it"


def play(folder: Path, method: AnyMethod, faults: Faults | None = None, *, kill: bool = False) -> World:
    """A run with a third device that is available from the second round on, and declares more than the others."""
    devices = fleet()
    for name, family in zip(CLIENTS, (SMALL, DEEP, WIDE), strict=True):
        devices[name] = replace(devices[name], network=encode_family(family), held_out_count=5)
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
def test_a_union_grows_with_new_clients_despite_losses_and_kills(method: AnyMethod, tmp_path: Path) -> None:
    calm = play(tmp_path / "calm", method)
    states = [{row.client_id: row.status for row in record.clients} for record in calm.notes.records]
    assert states[0]["cyd"].startswith("skipped: the device is not available")
    assert states[1] == states[2] == states[3] == dict.fromkeys(CLIENTS, "aggregated"), (
        "the third device was heard in round 1"
    )
    lineages = calm.server.state.lineages
    assert [(lineage.id, lineage.retired_round) for lineage in lineages] == [("", 0), ("union1", 1), ("union2", None)]
    assert lineages[-1].parent == "union1"
    sizes = {row.client_id: row.architecture_id for row in calm.notes.records[-1].clients}
    own = context_of(method=method).get_declared(lineages[-1]).members
    assert sizes == {
        name: own[family].architecture_id for name, family in zip(CLIENTS, (SMALL, DEEP, WIDE), strict=True)
    }
    rough = play(tmp_path / "rough", method, Faults(seed=3, loss=0.2, double=0.2, delay_s=1.5), kill=True)
    assert rough.model_bytes() == calm.model_bytes()


def test_the_limit_of_declared_networks_holds_for_members_that_leave() -> None:
    state = declare_networks(CONTEXT, *(replace(SMALL, widths=(4 * count,)) for count in (1, 2, 3)))
    for number, width in enumerate((4, 8, 12, 16, 20), start=1):
        declaration = replace(
            profile("eve"), network=encode_family(replace(SMALL, widths=(width,))), message_id=f"p{number}"
        )
        state, actions = step(CONTEXT, state, declaration, 1.0)
        (answer,) = [action.ack for action in actions if isinstance(action, Reply)]
        assert answer.problem == ("too_many" if number > MOST_NETWORKS else None)
        assert ("but may declare only 4" in answer.reason) == (number > MOST_NETWORKS)
        before = reload_state(state, 1.0)
        state, _ = step(CONTEXT, before, Presence(client_id="eve", session_id=f"eve-{number}", online=True), 1.0)
        state, _ = step(CONTEXT, state, declaration, 1.0)
        state, _ = step(CONTEXT, state, telemetry(CONTEXT, "eve", max(state.round, 1), attempt=state.attempt), 2.0)
        assert (state.clients["eve"].offer.brought is None) == (number > MOST_NETWORKS)
        state = replace(
            state, clients=MappingProxyType({}), live=replace(state.live, members=state.live.members.without({"eve"}))
        )
    assert len(state.brought["eve"]) == MOST_NETWORKS


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("changes", [{"widths": (65_536,)}, {"widths": (9000,), "depths": (4,)}], ids=str)
def test_a_network_that_is_too_large_is_in_no_union(
    method: AnyMethod, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is built, nor any other network of such a size."""
    for module in (replication, elastic_unions):
        monkeypatch.setattr(module, "size_in", limit_size(replication.size_in))
    context = context_of(rounds=3, method=method)
    state = measure_clients(context, declare_networks(context, SMALL, DEEP, replace(SMALL, **changes)), *CLIENTS)
    (_, union) = state.lineages
    assert set(union.members) == {SMALL, DEEP}
    assert state.clients["cyd"].stage == "skipped"
    assert {state.clients[name].stage for name in ("ada", "bob")} == {"preparing"}


@pytest.mark.parametrize("small_count", [2, 5])
@pytest.mark.parametrize(("width", "far"), [(16, False), (32, True)])  # of 8.5 and 29 times the parameters
def test_a_network_far_larger_than_the_median_does_not_set_the_width_of_others(
    small_count: int, width: int, far: bool
) -> None:
    """One member alone does not decide the width to which FedADP copies the others; among few, none is far larger."""
    large = replace(SMALL, widths=(width,))
    for method in METHODS:
        begin = method.roles().networks.begin
        assert begin is not None
        brought = MappingProxyType({**{f"c{index}": SMALL for index in range(small_count)}, "eve": large})
        beginning = BeginContext(
            network=CONTEXT.network, rates=(1.0,), clients=tuple(brought), carried_by=lambda _: (), brought=brought
        )
        (union,) = begin(beginning)
        left_out = far and small_count == 5 and isinstance(method, FedADP)
        assert (large in union.members) == (not left_out)
        assert SMALL in union.members


def limit_size(size_in: Callable[[Network, Network], Architecture]) -> Callable[[Network, Network], Architecture]:
    def size_small_networks(network: Network, part: Network) -> Architecture:
        assert (
            max(network.parameter_count(network.full_architecture()), part.parameter_count(part.full_architecture()))
            < 10**6
        )
        return size_in(network, part)

    return size_small_networks


@pytest.mark.slow
def test_unions_in_use_have_room_together() -> None:
    """Networks that have no union with each other each need a union of their own."""
    many = [
        replace(SMALL, group_size=1, norm="none", input_shape=(6,), class_count=classes) for classes in range(2, 40)
    ]
    groups = SLICES.add_to((), many)
    assert len(groups) == 8
    large = [replace(SMALL, widths=(4500,), class_count=classes) for classes in range(3, 8)]
    assert len(SLICES.add_to((), large)) == 2
    small = [replace(SMALL, class_count=2), replace(SMALL, class_count=9)]
    unions = SLICES.add_to((), [replace(large[0], widths=(9000,)), *large, *small])
    assert {*small} < {member for union in unions for member in union.members}, "large networks take no room from them"


@pytest.mark.slow
def test_large_networks_leave_room_for_later_ones() -> None:
    """However many come first, one after another: the next takes at most half of the room that they leave."""
    groups: list[Any] = []
    for width in range(4900, 100, -100):
        groups = SLICES.add_to(groups, [replace(SMALL, widths=(width,), class_count=3 + width % 7)])
    assert len(groups) == 7
    later = [replace(SMALL, class_count=2), replace(SMALL, class_count=11)]
    members = {member for group in SLICES.add_to(groups, later[:1]) for member in group.members}
    assert later[0] in members
