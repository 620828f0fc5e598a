"""FlexiFed: who averages what, of the architectures that clients have."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import ModelState, packed, unpacked
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.flexifed import FlexiFed, Sharing
from subfleet.methods.standalone import Standalone
from subfleet.rounds.terms import Terms
from subfleet.testing.rounds import Client, change_of, first_state, play, seen, terms_with
from subfleet.testing.subnets import same_bits

SHARINGS: tuple[Sharing, ...] = ("basic", "clustered", "max")
EVERY = pytest.mark.parametrize("sharing", SHARINGS)


def averaged(terms: Terms, before: ModelState, after: ModelState, client: Client, number: int = 1) -> set[str]:
    """Tensors of a client that moved otherwise than by its own change."""
    received, trained = (
        extract(terms.network, terms.space[client.size], seen(terms, s, client)) for s in (before, after)
    )
    change = change_of(terms, client, number)
    return {
        name for name in change if not torch.allclose(trained[name] - received[name], change[name], rtol=0, atol=1e-6)
    }


def whole_and_shallow(terms: Terms) -> tuple[int, int]:
    """Places of the whole network and of one that is the same but for the last block."""
    whole = len(terms.space) - 1
    kept = terms.space[whole].blocks[:-1]
    return whole, next(place for place, size in enumerate(terms.space) if not size.axes and size.blocks == kept)


@pytest.mark.slow
def test_flexifed_averages_more_the_further_it_shares(tmp_path: Path) -> None:
    found: dict[str, list[set[str]]] = {}
    for sharing in SHARINGS:
        terms = terms_with(FlexiFed(sharing=sharing))
        whole, shallow = whole_and_shallow(terms)
        clients = [Client(name=name, size=size) for name, size in (("a", whole), ("b", whole), ("c", shallow))]
        state = first_state(terms.network)
        folded = play(terms, state, clients, tmp_path).state
        found[sharing] = [averaged(terms, state, folded, client) for client in clients]
        assert not any(name.startswith("head") for names in found[sharing] for name in names)
    for one, other in (("basic", "clustered"), ("clustered", "max")):
        assert all(less <= more for less, more in zip(found[one], found[other], strict=True))
    # The space holds other widths, too, which nobody has: what these clients have in common is all but the last layers.
    for alike in found["basic"]:
        assert {"stem.weight", "section1.block1.layer2.weight"} <= alike
        assert not {"section1.block2.layer1.weight", "norm.weight"} & alike
    assert {"section1.block2.layer1.weight", "norm.weight"} <= found["clustered"][0]
    assert found["clustered"][2] == found["max"][2] == found["basic"][2]


@EVERY
def test_with_one_architecture_it_is_fedavg_but_for_the_head(sharing: Sharing, tmp_path: Path) -> None:
    terms, reference = terms_with(FlexiFed(weighting="samples", sharing=sharing)), terms_with(FedAvg())
    state, whole = first_state(terms.network), len(terms.space) - 1
    clients = [Client(name=name, size=whole, samples=count) for name, count in (("a", 3), ("b", 8))]
    mean = play(reference, state, [replace(client, size=0) for client in clients], tmp_path).state.shared
    folded = seen(terms, play(terms, state, clients, tmp_path).state, clients[0])
    assert all(torch.equal(folded[name], mean[name]) for name in mean if not name.startswith("head"))
    assert not torch.equal(folded["head.weight"], mean["head.weight"])


@pytest.mark.slow
@EVERY
def test_with_other_first_layers_it_is_standalone(sharing: Sharing, tmp_path: Path) -> None:
    terms, reference = terms_with(FlexiFed(sharing=sharing)), terms_with(Standalone())
    widths = {terms.network.shapes(size)["stem.weight"]: place for place, size in enumerate(terms.space)}
    assert len(widths) == 3
    clients = [Client(name=f"client{place}", size=place) for place in widths.values()]
    state = first_state(terms.network)
    shared, alone = (play(one, state, clients, tmp_path).state for one in (terms, reference))
    for client in clients:
        assert same_bits(seen(terms, shared, client), seen(reference, alone, client))


def test_who_comes_later_with_another_architecture_takes_nothing_from_the_others(tmp_path: Path) -> None:
    terms = terms_with(FlexiFed(sharing="basic"))
    whole, _ = whole_and_shallow(terms)
    a, b, absent = (Client(name=name, size=whole) for name in ("a", "b", "absent"))
    narrow = Client(name="narrow", size=0)
    first = play(terms, first_state(terms.network), [a, b, absent], tmp_path, 1).state
    assert "stem.weight" in averaged(terms, first_state(terms.network), first, a)
    second = play(terms, unpacked(packed(first)), [a, b, narrow], tmp_path, 2).state
    for client in (a, b, narrow):
        assert not averaged(terms, first, second, client, 2), "it goes on from what it had, by itself"
    assert same_bits(seen(terms, second, absent), seen(terms, first, absent))
    # The one that was there once still counts: else the others' own layers would be lost to what they had before.
    third = play(terms, unpacked(packed(second)), [a, b], tmp_path, 3).state
    assert not averaged(terms, second, third, a, 3)
    assert third.sizes == second.sizes
    assert {size.spec_id for size in third.sizes} == {terms.space[place].spec_id for place in (whole, 0)}


def test_methods_whose_copies_do_not_go_by_sizes_remember_none(tmp_path: Path) -> None:
    for method in (FlexiFed(sharing="max"), FedAvg()):
        terms = terms_with(method)
        folded = play(terms, first_state(terms.network), [Client(name="a", size=0)], tmp_path).state
        assert folded.sizes == ()
        assert not any(name.startswith("sizes") for name in packed(folded))
