"""FlexiFed: which clients average which layers, by their architectures."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import ModelState, pack_state, unpack_state
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.standalone import Standalone
from subfleet.rounds.context import RunContext
from subfleet.testing.rounds import DrawnClient, draw_change, draw_state, make_context, play, view_model
from subfleet.testing.submodels import have_same_bits

Sharing = Literal["basic", "clustered", "max"]
SHARINGS: tuple[Sharing, ...] = ("basic", "clustered", "max")
EVERY = pytest.mark.parametrize("sharing", SHARINGS)


def list_averaged(
    context: RunContext, before: ModelState, after: ModelState, client: DrawnClient, number: int = 1
) -> set[str]:
    """Return the tensors of a client that changed by anything other than its own update."""
    received, trained = (
        extract(context.network, context.space[client.size], view_model(context, s, client)) for s in (before, after)
    )
    change = draw_change(context, client, number)
    return {
        name for name in change if not torch.allclose(trained[name] - received[name], change[name], rtol=0, atol=1e-6)
    }


def find_whole_and_shallow(context: RunContext) -> tuple[int, int]:
    """Return the indices of the whole network and of the same network without its last block."""
    whole = len(context.space) - 1
    blocks = context.space[whole].blocks[:-1]
    return whole, next(index for index, size in enumerate(context.space) if not size.axes and size.blocks == blocks)


@pytest.mark.slow
def test_flexifed_averages_more_the_further_it_shares(tmp_path: Path) -> None:
    averaged: dict[str, list[set[str]]] = {}
    for sharing in SHARINGS:
        context = make_context(FlexiFed(sharing=sharing))
        whole, shallow = find_whole_and_shallow(context)
        clients = [DrawnClient(name=name, size=size) for name, size in (("a", whole), ("b", whole), ("c", shallow))]
        state = draw_state(context.network)
        aggregated = play(context, state, clients, tmp_path).state
        averaged[sharing] = [list_averaged(context, state, aggregated, client) for client in clients]
        assert not any(name.startswith("head") for names in averaged[sharing] for name in names)
    for narrower, wider in (("basic", "clustered"), ("clustered", "max")):
        assert all(fewer <= more for fewer, more in zip(averaged[narrower], averaged[wider], strict=True))
    # No client has the other widths of the space; these clients have all but the last layers in common.
    for names in averaged["basic"]:
        assert {"stem.weight", "section1.block1.layer2.weight"} <= names
        assert not {"section1.block2.layer1.weight", "norm.weight"} & names
    assert {"section1.block2.layer1.weight", "norm.weight"} <= averaged["clustered"][0]
    assert averaged["clustered"][2] == averaged["max"][2] == averaged["basic"][2]


@EVERY
def test_with_one_architecture_it_is_fedavg_but_for_the_head(sharing: Sharing, tmp_path: Path) -> None:
    context, reference = make_context(FlexiFed(weighting="samples", sharing=sharing)), make_context(FedAvg())
    state, whole = draw_state(context.network), len(context.space) - 1
    clients = [DrawnClient(name=name, size=whole, samples=count) for name, count in (("a", 3), ("b", 8))]
    mean = play(reference, state, [replace(client, size=0) for client in clients], tmp_path).state.shared
    aggregated = view_model(context, play(context, state, clients, tmp_path).state, clients[0])
    assert all(torch.equal(aggregated[name], mean[name]) for name in mean if not name.startswith("head"))
    assert not torch.equal(aggregated["head.weight"], mean["head.weight"])


@pytest.mark.slow
@EVERY
def test_with_other_first_layers_it_is_standalone(sharing: Sharing, tmp_path: Path) -> None:
    context, reference = make_context(FlexiFed(sharing=sharing)), make_context(Standalone())
    widths = {context.network.shapes(size)["stem.weight"]: index for index, size in enumerate(context.space)}
    assert len(widths) == 3
    clients = [DrawnClient(name=f"client{index}", size=index) for index in widths.values()]
    state = draw_state(context.network)
    shared, alone = (play(run_context, state, clients, tmp_path).state for run_context in (context, reference))
    for client in clients:
        assert have_same_bits(view_model(context, shared, client), view_model(reference, alone, client))


@pytest.mark.slow
def test_a_later_client_with_another_architecture_takes_nothing_from_the_others(tmp_path: Path) -> None:
    context = make_context(FlexiFed(sharing="basic"))
    whole, _ = find_whole_and_shallow(context)
    a, b, absent = (DrawnClient(name=name, size=whole) for name in ("a", "b", "absent"))
    narrow = DrawnClient(name="narrow", size=0)
    first = play(context, draw_state(context.network), [a, b, absent], tmp_path, 1).state
    assert "stem.weight" in list_averaged(context, draw_state(context.network), first, a)
    second = play(context, unpack_state(pack_state(first)), [a, b, narrow], tmp_path, 2).state
    for client in (a, b, narrow):
        assert not list_averaged(context, first, second, client, 2), "it continues from its own weights, alone"
    assert have_same_bits(view_model(context, second, absent), view_model(context, first, absent))
    # The client of round 2 still counts; otherwise the others' own layers would revert to their earlier weights.
    third = play(context, unpack_state(pack_state(second)), [a, b], tmp_path, 3).state
    assert not list_averaged(context, second, third, a, 3)
    assert third.sizes == second.sizes
    assert {size.architecture_id for size in third.sizes} == {
        context.space[index].architecture_id for index in (whole, 0)
    }


def test_methods_with_copies_not_grouped_by_sizes_store_no_sizes(tmp_path: Path) -> None:
    for method in (FlexiFed(sharing="max"), FedAvg()):
        context = make_context(method)
        aggregated = play(context, draw_state(context.network), [DrawnClient(name="a", size=0)], tmp_path).state
        assert aggregated.sizes == ()
        assert not any(name.startswith("sizes") for name in pack_state(aggregated))
