"""Several networks in a run: each is folded by its own clients, and appears or retires with a fold."""

from dataclasses import replace
from pathlib import Path

import pytest
from server.test_networks import COPY, FIRST, TERMS, grown, replicated

from subfleet.elastic.lineage import Lineage
from subfleet.folding.folding import Folding
from subfleet.methods.run_networks import Evolution, EvolutionContext
from subfleet.protocol.errors import ConfigError
from subfleet.rounds.state import Seat
from subfleet.testing.rounds import Client, first_state, seat_of, with_steps
from subfleet.testing.subnets import same_bits
from subfleet.transport.blob_store import BlobStore


def seat_in(lineage: Lineage, client: Client, blobs: BlobStore) -> Seat:
    """The seat of a client that has trained the same of another network."""
    terms = replace(TERMS, first=TERMS.declared(lineage))
    return seat_of(terms, client, blobs)


def test_networks_are_folded_each_by_its_own_clients(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    state, lineages = grown(replicated("a"), first_state(TERMS.network))
    first = [seat_of(TERMS, Client(name=name, size=place), blobs) for place, name in enumerate(("ada", "cyd"))]
    others = [
        seat_in(lineages[1], Client(name=name, size=place, samples=7), blobs)
        for place, name in enumerate(("bob", "dan"))
    ]
    folding = Folding(terms=TERMS, blobs=blobs)
    together = folding.fold(state, 1, [*first, *others], None, lineages).state
    for network_id, seats in (("", first), ("a", others)):
        alone = folding.fold(state, 1, seats, None, lineages).state
        assert same_bits(together.of(network_id).shared, alone.of(network_id).shared)
        assert not same_bits(together.of(network_id).shared, state.of(network_id).shared)
        other = "a" if not network_id else ""
        assert same_bits(alone.of(other).shared, state.of(other).shared), "nobody trained it"


def test_an_update_that_is_refused_in_one_network_leaves_the_other_its_bits(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    state, lineages = grown(COPY, first_state(TERMS.network))
    seats = [seat_of(TERMS, Client(name="ada", size=0), blobs), seat_in(COPY, Client(name="bob", size=0), blobs)]
    assert seats[1].update is not None
    folding = Folding(terms=TERMS, blobs=blobs)
    expected = folding.fold(state, 1, seats, None, lineages).state.of("").shared
    blobs.path(seats[1].update.blob).write_bytes(b"no longer")
    folded = folding.fold(state, 1, seats, None, lineages)
    assert set(folded.refused) == {"bob"}
    assert [one.client_id for one in folded.clients] == ["ada"]
    assert same_bits(folded.state.of("").shared, expected)
    assert same_bits(folded.state.of("a").shared, state.of("a").shared)


def test_a_network_appears_with_the_fold_and_retires_with_the_next(tmp_path: Path) -> None:
    """A method that grows a network in its first round and gives up the old one in its second."""
    blobs, wide = BlobStore(tmp_path), replicated()

    def evolve(now: EvolutionContext) -> Evolution:
        if now.round == 1:
            return Evolution(after=now.after, born=(wide,))
        return Evolution(after=now.after, retired=("",))

    terms = replace(TERMS, roles=with_steps(TERMS.roles, evolve=evolve))
    folding, seats = Folding(terms=terms, blobs=blobs), [seat_of(TERMS, Client(name="ada", size=0), blobs)]
    plain = Folding(terms=TERMS, blobs=blobs).fold(first_state(TERMS.network), 1, seats)
    first = folding.fold(first_state(TERMS.network), 1, seats)
    assert first.lineages == (FIRST, wide)
    assert same_bits(first.state.of("").shared, plain.state.shared), "that a network appears moves no other"
    assert same_bits(first.folded.shared, plain.state.shared)
    second = folding.fold(first.state, 2, seats, None, first.lineages)
    assert second.lineages == (replace(FIRST, retired_round=2), wide)
    assert second.state.network_ids == ("wide",)
    assert second.folded.network_ids == ("", "wide"), "a round is evaluated by the networks that it was played with"
    with pytest.raises(ConfigError, match="the model has no network ''"):
        folding.fold(second.state, 3, seats, None, second.lineages)
