"""Clients with networks that are not slices of the model: what they receive, and how their changes return."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from server.methods.method_cases import QUICK
from torch import Tensor

from subfleet.aggregation.updates import encode_submodel
from subfleet.aggregation.views import Views
from subfleet.arrays import decode_arrays
from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.exchanges import Exchange, embed_submodel
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.elastic.replication import Replication
from subfleet.methods.aggregator import Participant
from subfleet.methods.assigner import Assigner
from subfleet.methods.describing import MethodInfo
from subfleet.methods.roles import Roles
from subfleet.protocol.submodel import Architecture
from subfleet.testing import MethodContract
from subfleet.testing.rounds import MODEL, DrawnClient, draw_change, draw_state, list_clients, make_context, play
from subfleet.testing.submodels import have_same_bits


def draw_replication(network: Network, size: Architecture, client_id: str) -> Replication:
    """Drawn once for each client: redrawn in each round, copies would give the model's indices no meaning."""
    seed = hashlib.sha256(f"{client_id}/{size.architecture_id}".encode()).digest()
    return Replication.draw(network, size, random.Random(seed))


def replicate(network: Network, client: Participant, kept_tensors: Mapping[str, Tensor]) -> Exchange:
    return draw_replication(network, client.size, client.client_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """Each client trains its own network, and the model holds copies of every index: the group form of FedADP."""

    TYPE: ClassVar[str] = "copying"
    INFO: ClassVar[MethodInfo] = MethodInfo(title="Copying", paper="none, for tests", varies=("width", "depth"))

    def roles(self) -> Roles:
        return Roles(assigner=Assigner(exchange=replicate))


@pytest.mark.slow
class TestCopying(MethodContract):
    method = Copying()
    model: Family = replace(MODEL, norm="batch")

    def test_placed_submodels_keep_their_size(self) -> None:
        """As for every method that places sizes in front."""
        super().test_placed_submodels_keep_their_size()


def make_participant(client: DrawnClient, size: Architecture) -> Participant:
    return Participant(client_id=client.name, architecture=size, size=size)


def compute_outputs(network: Network, architecture: Architecture, state: dict[str, Tensor]) -> Tensor:
    module = build_module(network, architecture)
    module.load_state_dict(state)
    inputs = torch.randn(6, *network.config.input_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outputs: Tensor = module.eval()(inputs)
    return outputs


@pytest.mark.slow
def test_one_client_gets_back_what_it_trained(tmp_path: Path) -> None:
    """Down after up is the identity, so that a single client loses nothing of its training."""
    context = make_context(Copying(), replace(MODEL, norm="batch"))
    client = DrawnClient(name="ada", size=0)
    recipient = make_participant(client, context.space[0])
    views = Views(context=context, samples=torch.zeros(1))
    state = draw_state(context.network)
    for number in (1, 2):
        before = extract(context.network, recipient.architecture, views.of(state, recipient).tensors)
        state = play(context, state, [client], tmp_path / str(number), number).state
        after = extract(context.network, recipient.architecture, views.of(state, recipient).tensors)
        change = draw_change(context, client, number)
        for name in change:
            torch.testing.assert_close(after[name], before[name] + change[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_after_a_round_of_one_client_the_whole_model_computes_what_the_client_does(tmp_path: Path) -> None:
    """The model begins as copies of the client's network, with the identity in the blocks that the client lacks."""
    context = make_context(Copying(), Mlp(input_shape=(5,), class_count=4, widths=(8, 12), depths=(2, 3), norm="batch"))
    client = DrawnClient(name="ada", size=0)
    network, size = context.network, context.space[0]
    recipient = make_participant(client, size)
    first = draw_state(network)
    replication = draw_replication(network, size, "ada")
    whole = replication.grow(replication.down(first.shared), first.shared)
    absent = {name for name, decl in network.tensors.items() if decl.part and decl.part not in size.blocks}
    whole |= {name: torch.zeros_like(whole[name]) for name in absent if network.tensors[name].role == "residual"}
    state = play(context, replace(first, shared=whole), [client], tmp_path).state
    views = Views(context=context, samples=torch.zeros(1))
    own = extract(network, size, views.prepare_tensors(views.of(state, recipient)))
    torch.testing.assert_close(
        compute_outputs(network, network.full_architecture(), dict(state.shared)),
        compute_outputs(network, size, own),
        rtol=1e-3,
        atol=1e-3,
    )


def test_two_clients_of_one_size_receive_their_own_weights() -> None:
    """No cache mixes up the two clients."""
    context = make_context(Copying(), replace(MODEL, norm="batch"))
    views, state = Views(context=context, samples=torch.zeros(1)), draw_state(context.network)
    size = context.space[0]
    ada, bob = (Participant(client_id=name, architecture=size, size=size) for name in ("ada", "bob"))
    assert views.of(state, ada).key != views.of(state, bob).key
    payloads = [encode_submodel(context.network, size, views.of(state, client).tensors) for client in (ada, bob)]
    assert payloads[0] != payloads[1]
    expected = draw_replication(context.network, size, "bob").down(state.shared)
    arrays = decode_arrays(payloads[1])
    assert all(torch.equal(torch.from_numpy(arrays[name].copy()), tensor) for name, tensor in expected.items())
    whole = context.network.full_architecture()
    everything = Participant(client_id="ada", architecture=whole, size=whole)
    assert have_same_bits(views.of(state, everything).tensors, state.shared)


@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "nefl"])
def test_extracting_an_embedded_submodel_gives_the_submodel(name: str) -> None:
    context = make_context(QUICK[name])
    state = draw_state(context.network).shared
    for size in context.space:
        local = extract(context.network, size, state)
        assert have_same_bits(extract(context.network, size, embed_submodel(context.network, size, local)), local)


@pytest.mark.slow
def test_the_order_of_clients_with_networks_of_their_own_does_not_matter(tmp_path: Path) -> None:
    context = make_context(Copying(), replace(MODEL, norm="batch"))
    clients, state = list_clients(context), draw_state(network_of(replace(MODEL, norm="batch")))
    there, back = (
        play(context, state, order, tmp_path / str(index)).state for index, order in enumerate((clients, clients[::-1]))
    )
    assert have_same_bits(there.shared, back.shared)
