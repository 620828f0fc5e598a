"""Several networks in a run: each is aggregated by its own clients, and appears or retires with an aggregation."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from server.aggregating import aggregate_clients
from server.test_networks import COPY, FIRST, grow_network, plan, wider_lineage

from subfleet.elastic.lineage import Lineage
from subfleet.methods.run_networks import Evolution, EvolutionContext
from subfleet.protocol.errors import ConfigError
from subfleet.rounds.state import ClientState
from subfleet.testing.rounds import DrawnClient, draw_state, store_update, with_steps
from subfleet.testing.submodels import have_same_bits
from subfleet.transport.blob_store import BlobStore


def client_in(lineage: Lineage, client: DrawnClient, blobs: BlobStore) -> ClientState:
    """The state of a client that has trained the same submodel of another network."""
    context = replace(plan(), first=plan().get_declared(lineage))
    return store_update(context, client, blobs)


@pytest.mark.slow
def test_networks_are_aggregated_each_by_its_own_clients(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    state, lineages = grow_network(wider_lineage("a"), draw_state(plan().network))
    first = [
        store_update(plan(), DrawnClient(name=name, size=index), blobs) for index, name in enumerate(("ada", "cyd"))
    ]
    second = [
        client_in(lineages[1], DrawnClient(name=name, size=index, samples=7), blobs)
        for index, name in enumerate(("bob", "dan"))
    ]
    aggregation = partial(aggregate_clients, plan(), blobs)
    together = aggregation(state, 1, [*first, *second], None, lineages).state
    for network_id, clients in (("", first), ("a", second)):
        alone = aggregation(state, 1, clients, None, lineages).state
        assert have_same_bits(together.of(network_id).shared, alone.of(network_id).shared)
        assert not have_same_bits(together.of(network_id).shared, state.of(network_id).shared)
        other = "a" if not network_id else ""
        assert have_same_bits(alone.of(other).shared, state.of(other).shared), "nobody trained it"


def test_an_update_that_is_refused_in_one_network_leaves_the_other_its_bits(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    state, lineages = grow_network(COPY, draw_state(plan().network))
    clients = [
        store_update(plan(), DrawnClient(name="ada", size=0), blobs),
        client_in(COPY, DrawnClient(name="bob", size=0), blobs),
    ]
    assert clients[1].update is not None
    aggregation = partial(aggregate_clients, plan(), blobs)
    expected = aggregation(state, 1, clients, None, lineages).state.of("").shared
    blobs.path(clients[1].update.blob).write_bytes(b"no longer")
    aggregated = aggregation(state, 1, clients, None, lineages)
    assert set(aggregated.refused) == {"bob"}
    assert [client.client_id for client in aggregated.clients] == ["ada"]
    assert have_same_bits(aggregated.state.of("").shared, expected)
    assert have_same_bits(aggregated.state.of("a").shared, state.of("a").shared)


def test_a_network_appears_with_the_aggregate_and_retires_with_the_next(tmp_path: Path) -> None:
    """A method that grows a network in its first round and retires the old one in its second."""
    blobs, wide = BlobStore(tmp_path), wider_lineage()

    def evolve(inputs: EvolutionContext) -> Evolution:
        if inputs.round == 1:
            return Evolution(after=inputs.after, born=(wide,))
        return Evolution(after=inputs.after, retired=("",))

    context = replace(plan(), roles=with_steps(plan().roles, evolve=evolve))
    aggregation, clients = (
        partial(aggregate_clients, context, blobs),
        [store_update(plan(), DrawnClient(name="ada", size=0), blobs)],
    )
    plain = aggregate_clients(plan(), blobs, draw_state(plan().network), 1, clients)
    first = aggregation(draw_state(plan().network), 1, clients)
    assert first.lineages == (FIRST, wide)
    assert have_same_bits(first.state.of("").shared, plain.state.shared), "a new network changes no other"
    assert have_same_bits(first.aggregated.shared, plain.state.shared)
    second = aggregation(first.state, 2, clients, None, first.lineages)
    assert second.lineages == (replace(FIRST, retired_round=2), wide)
    assert second.state.network_ids == ("wide",)
    assert second.aggregated.network_ids == ("", "wide"), "a round is evaluated with the networks that it trained"
    with pytest.raises(ConfigError, match="the model has no network ''"):
        aggregation(second.state, 3, clients, None, second.lineages)
