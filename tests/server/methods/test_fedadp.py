"""FedADP on drawn updates: invariants P2 to P4, the part of the union that a client has, and growth of the union."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from subfleet.aggregation.views import Views
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.growing import derive_settings
from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import ModelState, pack_state, unpack_state
from subfleet.elastic.network import Network
from subfleet.elastic.replication import Replication, size_in
from subfleet.methods.aggregator import Participant
from subfleet.methods.fedadp import FedADP, succeed_union
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.uniting import Succession
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.schema import from_plain
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.rounds.context import RunContext
from subfleet.testing.rounds import DrawnClient, draw_change, draw_state, list_clients, make_context, play
from subfleet.testing.submodels import have_same_bits

PLAIN = Mlp(input_shape=(5,), class_count=4, widths=(8, 12), depths=(2, 3), norm="none")


def context_of(method: FedADP | FedAvg | None = None, model: Mlp = PLAIN) -> RunContext:
    return make_context(FedADP() if method is None else method, model)


def make_participant(context: RunContext, client: DrawnClient) -> Participant:
    size = context.space[client.size]
    return Participant(client_id=client.name, architecture=size, size=size)


def extract_received(context: RunContext, state: ModelState, client: DrawnClient) -> dict[str, Tensor]:
    recipient = make_participant(context, client)
    return extract(
        context.network,
        recipient.architecture,
        Views(context=context, samples=torch.zeros(1)).of(state, recipient).tensors,
    )


def compute_outputs(network: Network, architecture: Architecture, weights: dict[str, Tensor]) -> Tensor:
    module = build_module(network, architecture).double()
    module.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    inputs = torch.randn(6, *network.config.input_shape, generator=torch.Generator().manual_seed(1)).double()
    return module.eval()(inputs)  # type: ignore[no-any-return]


def relative_distance(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the distance of weights from a reference, relative to the norm of the reference."""
    squares = math.fsum(float((weights[name] - tensor).square().sum()) for name, tensor in reference.items())
    return math.sqrt(squares / math.fsum(float(tensor.square().sum()) for tensor in reference.values()))


def test_a_client_alone_gets_back_what_it_trained_and_by_the_paper_it_does_not(tmp_path: Path) -> None:
    """P2: down after up is the identity in the group form; as printed in the paper, most weights change."""
    distances: dict[str, float] = {}
    merges: tuple[Literal["group", "paper"], ...] = ("group", "paper")
    for merge in merges:
        context = context_of(FedADP(merge=merge))
        client, state = DrawnClient(name="ada", size=0), draw_state(context.network)
        before = extract_received(context, state, client)
        after = extract_received(context, play(context, state, [client], tmp_path / merge).state, client)
        trained = {name: before[name] + change for name, change in draw_change(context, client, 1).items()}
        distances[merge] = relative_distance(after, trained)
    assert distances["group"] < 1e-6
    assert distances["paper"] > 0.1


@pytest.mark.slow
def test_clients_that_all_have_the_union_are_averaged_as_fedavg_does(tmp_path: Path) -> None:
    """P3: to the last bit in the group form, and to float32 where the union becomes the mean of networks."""
    whole = [DrawnClient(name=name, size=-1, samples=count) for name, count in (("ada", 3), ("bob", 5), ("cyd", 1))]
    average = make_context(FedAvg(), PLAIN)
    state = draw_state(average.network)
    expected = play(average, state, whole, tmp_path / "fedavg").state.shared
    assert have_same_bits(play(context_of(), state, whole, tmp_path / "group").state.shared, expected)
    methods = (FedADP(merge="paper"), FedADP(merge="paper", absent="identity"), FedADP(absent="identity"))
    for index, method in enumerate(methods):
        shared = play(context_of(method), state, whole, tmp_path / str(index)).state.shared
        assert relative_distance(dict(shared), dict(expected)) < 1e-6, method


@pytest.mark.slow
def test_a_round_that_learns_nothing_leaves_the_union_and_every_client_as_they_are(tmp_path: Path) -> None:
    """P4, in the group form, for clients of any networks."""
    context = context_of()
    clients, state = [replace(client, scale=0.0) for client in list_clients(context)], draw_state(context.network)
    after = play(context, state, clients, tmp_path).state
    assert have_same_bits(after.shared, state.shared)
    for client in clients:
        assert have_same_bits(extract_received(context, after, client), extract_received(context, state, client))


@pytest.mark.slow
def test_a_client_alone_computes_in_all_rounds_what_it_did_after_the_first(tmp_path: Path) -> None:
    """P4 for a client with fewer layers than the union; its absent layers are identities."""
    context = context_of(FedADP(absent="identity"))
    client, state = DrawnClient(name="ada", size=0, scale=0.0), draw_state(context.network)
    own = compute_outputs(context.network, context.space[0], extract_received(context, state, client))
    for number in (1, 2):
        state = play(context, state, [client], tmp_path / str(number), number).state
        torch.testing.assert_close(
            compute_outputs(context.network, context.space[0], extract_received(context, state, client)), own
        )


def test_a_layer_that_a_client_lacks_counts_only_if_configured(tmp_path: Path) -> None:
    """It counts as the identity, with a last layer of zeros; otherwise the layer is left to the other clients."""
    client = DrawnClient(name="ada", size=0)
    modes: tuple[Literal["keep", "identity"], ...] = ("keep", "identity")
    for absent in modes:
        context = context_of(FedADP(absent=absent))
        network, state = context.network, draw_state(context.network)
        after = play(context, state, [client], tmp_path / absent).state
        lacking = {block.name for block in network.blocks if block.name not in context.space[0].blocks}
        closing = [name for name, decl in network.tensors.items() if decl.part in lacking and decl.role == "residual"]
        assert closing
        for name in closing:
            if absent == "identity":
                assert float(after.shared[name].abs().max()) < 1e-5, name
            else:
                assert torch.equal(after.shared[name], state.shared[name]), name


def test_what_a_client_copies_is_drawn_once_and_survives_a_crash(tmp_path: Path) -> None:
    context = context_of()
    ada, bob, state = DrawnClient(name="ada", size=0), DrawnClient(name="bob", size=0), draw_state(context.network)
    first = play(context, state, [ada, bob], tmp_path / "1").state
    copies = {name: tensor for name, tensor in first.kept.items() if name.startswith("copies/")}
    assert {name.split("/")[1] for name in copies} == {"ada", "bob"}
    assert any(not torch.equal(tensor, copies[name.replace("ada", "bob")]) for name, tensor in copies.items())
    second = play(context, unpack_state(pack_state(first)), [ada], tmp_path / "2", 2).state
    assert all(torch.equal(second.kept[name], tensor) for name, tensor in copies.items())
    # The remembered copies count, not those that would be drawn now.
    turned = {name: tensor.flip(0) for name, tensor in copies.items()}
    elsewhere = replace(first, kept=turned)
    assert relative_distance(extract_received(context, elsewhere, ada), extract_received(context, first, ada)) > 0.01


@pytest.mark.slow
def test_a_larger_union_has_every_client_as_the_copy_that_it_was(tmp_path: Path) -> None:
    """The union becomes wider and deeper; each client's network stays the same, to float32."""
    context = context_of()
    clients = list_clients(context)[:3]
    state = play(context, draw_state(context.network), clients, tmp_path).state
    parent = context.network
    larger = replace(network_of(replace(PLAIN, widths=(12, 20), depths=(3, 4))), id="union2")
    sizes = {
        size.architecture_id: size_in(larger, network_of(derive_settings(parent, size)))
        for size in _list_full_depth(context)
    }
    weight_map, grown = succeed_union(
        "drawn",
        Succession(
            parent=parent,
            network=larger,
            state=state,
            stream=random.Random(4),
            first=init_state(larger, 1),
            sizes=sizes,
        ),
    )
    assert weight_map.TYPE == "replicated"
    torch.testing.assert_close(
        compute_outputs(larger, larger.full_architecture(), dict(grown.shared)),
        compute_outputs(parent, parent.full_architecture(), dict(state.shared)),
        rtol=1e-5,
        atol=1e-5,
    )
    exchange = FedADP().roles().assigner.exchange
    assert exchange is not None
    for client in clients:
        size = context.space[client.size]
        whole = replace(size, axes=_cut_axes(parent, larger, size), network="union2")
        recipient = Participant(client_id=client.name, architecture=whole, size=whole)
        own = exchange(larger, recipient, grown.kept).down(grown.shared)
        assert relative_distance(own, extract_received(context, state, client)) < 1e-6
        # With newly drawn copies it would be another network.
        assert (
            relative_distance(
                exchange(larger, recipient, {}).down(grown.shared), extract_received(context, state, client)
            )
            > 0.01
        )


def _cut_axes(parent: Network, larger: Network, size: Architecture) -> tuple[tuple[str, Prefix], ...]:
    sizes = parent.sizes(size)
    cut_sizes = {name: sizes[name] for name, axis in larger.axes.items() if name in sizes and sizes[name] < axis.size}
    return tuple((name, Prefix(size=count)) for name, count in sorted(cut_sizes.items()))


def _list_full_depth(context: RunContext) -> list[Architecture]:
    every = context.network.full_architecture().blocks
    return [size for size in context.space if size.blocks == every]


@pytest.mark.parametrize("changes", [{"merge": "mean"}, {"absent": "zero"}])
def test_its_parameters_are_checked_where_they_are_read(changes: dict[str, str]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(changes))):
        from_plain(FedADP, {"type": "fedadp", **changes})


def test_cyclic_copies_average_clients_of_one_architecture_as_if_they_were_alone(tmp_path: Path) -> None:
    """With cyclic copies, both clients' neurons have the same copies; with drawn ones, neurons are mixed."""
    distances = {}
    for copies in ("cyclic", "drawn"):
        context = context_of(FedADP(copies=copies, weighting="uniform"))
        ada, bob = (DrawnClient(name=name, size=0) for name in ("ada", "bob"))
        state = draw_state(context.network)
        before = extract_received(context, state, ada)
        after = extract_received(context, play(context, state, [ada, bob], tmp_path / copies).state, ada)
        changes = [draw_change(context, client, 1) for client in (ada, bob)]
        distances[copies] = relative_distance(
            after, {name: before[name] + (change + changes[1][name]) / 2 for name, change in changes[0].items()}
        )
    assert distances["cyclic"] < 1e-6
    assert distances["drawn"] > 0.01


def test_cyclic_copies_of_cyclic_copies_are_cyclic_copies() -> None:
    network = network_of(replace(PLAIN, widths=(16, 24)))
    middle = network_of(replace(PLAIN, widths=(8, 12)))
    whole = {name: torch.randn(decl.shape) for name, decl in network.tensors.items()}
    small = network_of(replace(PLAIN, widths=(4, 6), group_size=2))
    step = Replication.cycle(network, size_in(network, middle)).down(whole)
    twice = Replication.cycle(middle, size_in(middle, small)).down(step)
    once = Replication.cycle(network, size_in(network, small)).down(whole)
    assert relative_distance(once, twice) < 1e-6
