"""Unions of networks that clients bring: the first union of a run, its successors, and the slices of clients."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from declared import list_shapes
from server.aggregating import aggregate_clients
from torch import Tensor

from subfleet.aggregation.aggregation import apply_evolution
from subfleet.aggregation.views import Views
from subfleet.elastic.building import network_of
from subfleet.elastic.families import AnyFamily
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.families.records.transformers import Vit
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.replication import size_in
from subfleet.methods import AnyMethod
from subfleet.methods.aggregator import Participant
from subfleet.methods.clustered import Clustered
from subfleet.methods.fedadp import FedADP
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.run_networks import BeginContext, Evolution, EvolutionContext
from subfleet.methods.sizes import SLICES, hash_architecture
from subfleet.methods.standalone import Standalone
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import RunState
from subfleet.serving.loading import load_model
from subfleet.testing.rounds import DrawnClient, make_context, store_update
from subfleet.testing.submodels import have_same_bits
from subfleet.transport.blob_store import BlobStore

SMALL = Mlp(input_shape=(5,), class_count=4, widths=(8,), depths=(1,), norm="none")
DEEP = replace(SMALL, depths=(3,))
WIDE = replace(SMALL, widths=(16,), depths=(2,))
OTHER = replace(SMALL, norm="batch")
METHODS: tuple[AnyMethod, ...] = (
    FlexiFed(choice="declared"),
    FlexiFed(choice="declared", sharing="basic"),
    FlexiFed(choice="declared", sharing="clustered"),
    Clustered(choice="declared"),
    Standalone(choice="declared"),
    FedADP(choice="declared"),
)


def context_of(method: AnyMethod) -> RunContext:
    return make_context(method, SMALL)


def begin_unions(context: RunContext, *brought: AnyFamily) -> tuple[Lineage, ...]:
    assert context.roles.networks.begin is not None
    names = [f"client{index}" for index in range(len(brought))]
    return context.roles.networks.begin(
        BeginContext(
            network=context.network,
            rates=(1.0,),
            clients=tuple(names),
            brought=MappingProxyType(dict(zip(names, brought, strict=True))),
            carried_by=lambda lineage: tuple(names),
        )
    )


def make_retired(context: RunContext) -> Lineage:
    return Lineage(id="", config=context.config.model, retired_round=0)


def load_first_model(context: RunContext, lineages: tuple[Lineage, ...]) -> ModelState:
    before = RunState(lineages=lineages)
    return load_model(context, before, None, Path(), None)  # type: ignore[arg-type]  # without a round, no journal is read


def make_evolution_context(
    context: RunContext, state: ModelState, lineages: tuple[Lineage, ...], *brought: AnyFamily
) -> EvolutionContext:
    networks = {lineage.id: context.get_declared(lineage).network for lineage in lineages if lineage.living}
    return EvolutionContext(
        round=2,
        seed=3,
        lineages=lineages,
        networks=MappingProxyType(networks),
        before=state,
        after=state,
        clients=(),
        losses={},
        carried_by=lambda lineage: (),
        aggregated_with=lambda network_id, names: state,
        brought=brought,
    )


def evolve(context: RunContext, state: ModelState, lineages: tuple[Lineage, ...], *brought: AnyFamily) -> Evolution:
    assert context.roles.networks.evolve is not None
    return context.roles.networks.evolve(make_evolution_context(context, state, lineages, *brought))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_run_begins_with_one_union_of_all_networks_of_a_family(method: AnyMethod) -> None:
    (union,) = begin_unions(context_of(method), SMALL, DEEP, SMALL, WIDE)
    assert union.id == "union1"
    assert list_shapes(union.config) == list_shapes(
        replace(SMALL, widths=(16,), depths=(3,), hidden_widths=(16, 16, 8))
    )
    assert union.members == (SMALL, DEEP, WIDE)
    assert "3 networks of family mlp" in union.reason
    sizes = context_of(method).get_declared(union).members
    assert set(sizes) == {SMALL, DEEP, WIDE}
    for family, size in sizes.items():
        own = network_of(family)
        assert network_of(union.config).shapes(replace(size, network="")) == own.shapes(own.full_architecture())


def test_networks_that_have_no_union_have_each_their_own() -> None:
    context = context_of(FedADP(choice="declared"))
    unions = begin_unions(context, SMALL, OTHER, WIDE)
    assert [(union.id, union.members) for union in unions] == [("union1", (SMALL, WIDE)), ("union2", (OTHER,))]
    assert begin_unions(context) == ()


def test_a_network_that_no_server_can_hold_is_in_no_union() -> None:
    huge = replace(SMALL, widths=(8192,), depths=(3,))  # 400 million parameters
    (union,) = begin_unions(context_of(FlexiFed(choice="declared")), huge, SMALL)
    assert union.members == (SMALL,)


def test_fedadp_joins_only_what_can_be_copied() -> None:
    """A norm over a whole stream measures the same only if the width is a whole multiple."""
    vit = Vit(input_shape=(1, 8, 8), class_count=4, widths=(8,), depths=(1,), heads=(2,), patch=4, head_width=4)
    wider = replace(vit, widths=(12,))
    unions = SLICES.join((vit, wider))
    assert unions is not None
    context = make_context(FedADP(choice="declared"), vit)
    assert [union.members for union in begin_unions(context, vit, wider)] == [(vit,), (wider,)]
    assert [union.members for union in begin_unions(context, vit, replace(vit, widths=(16,)))] == [
        (vit, replace(vit, widths=(16,)))
    ]


def test_a_later_network_has_its_union_succeeded_and_others_stay() -> None:
    context = context_of(FedADP(choice="declared"))
    before = (make_retired(context), *begin_unions(context, SMALL, OTHER))
    state = load_first_model(context, before)
    answer = evolve(context, state, before, WIDE, DEEP)
    (born,) = answer.born
    assert (born.id, born.parent, born.map.TYPE, born.members) == (
        "union3",
        "union1",
        "replicated",
        (SMALL, WIDE, DEEP),
    )
    assert (answer.retired, born.born_round) == (("union1",), 2)
    assert "2 more networks of family mlp" in born.reason
    after, lineages = apply_evolution(context, make_evolution_context(context, state, before, WIDE, DEEP), answer)
    assert after.network_ids == ("union2", "union3")
    assert [lineage.id for lineage in lineages if lineage.living] == ["union2", "union3"]
    # Known networks do not lead to a successor, and a network that fits in the union leads to a copy of it.
    assert not evolve(context, after, lineages).born
    inside = replace(SMALL, depths=(2,))
    again = evolve(context, after, lineages, inside)
    assert (again.born[0].map.TYPE, again.born[0].config) == ("copied", born.config)
    assert have_same_bits(again.states[again.born[0].id].shared, after.of("union3").shared)


def draw_tensors(network: Network, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(decl.shape, generator=generator) for name, decl in network.tensors.items()}


def make_member(context: RunContext, lineage: Lineage, client_id: str, family: AnyFamily) -> Participant:
    size = context.get_declared(lineage).members[family]
    return Participant(client_id=client_id, architecture=size, size=size)


def train_state(context: RunContext, lineage: Lineage, state: ModelState) -> ModelState:
    """Return a state with drawn shared tensors and drawn copies for every client."""
    network = context.get_declared(lineage).network
    own = state.of(lineage.id)
    sizes = (
        tuple(sorted(context.get_declared(lineage).members.values()))
        if context.roles.aggregator.groups_by_sizes
        else ()
    )
    copies: dict[str, Any] = {}
    for index, family in enumerate(lineage.members):
        client = make_member(context, lineage, f"client{index}", family)
        for name, key in context.roles.aggregator.sharing_groups(network, client, sizes).items():
            if key:
                copies.setdefault(key, {})[name] = draw_tensors(network, index + 5)[name]
    return state.with_network(lineage.id, replace(own, shared=draw_tensors(network, 1), copies=copies, sizes=sizes))


@pytest.mark.parametrize("method", METHODS[:-1], ids=repr)
def test_who_has_a_slice_or_a_copy_has_the_same_in_the_successor(method: AnyMethod) -> None:
    """To the last bit, however clients share tensors."""
    context = context_of(method)
    before = (make_retired(context), *begin_unions(context, SMALL, DEEP))
    state = train_state(context, before[1], load_first_model(context, before))
    after, lineages = apply_evolution(
        context, make_evolution_context(context, state, before, WIDE), evolve(context, state, before, WIDE)
    )
    assert lineages[-1].map.TYPE == "placed"
    assert list_shapes(lineages[-1].config) == list_shapes(
        replace(SMALL, widths=(16,), depths=(3,), hidden_widths=(16, 16, 8))
    )
    views = Views(context=context, samples=torch.zeros(1))
    for index, family in enumerate((SMALL, DEEP)):
        seen = []
        for lineage, model in ((before[1], state), (lineages[-1], after)):
            participant = make_member(context, lineage, f"client{index}", family)
            seen.append(
                extract(
                    context.get_declared(lineage).network,
                    participant.architecture,
                    views.of(model, participant).tensors,
                )
            )
        assert have_same_bits(seen[0], seen[1])
    assert {size.network for size in after.of("union2").sizes} <= {"union2"}
    assert len(after.of("union2").sizes) == len(state.of("union1").sizes)


def test_an_architecture_is_the_same_in_every_union() -> None:
    wide, wider = network_of(WIDE), network_of(replace(WIDE, widths=(24,), depths=(4,)))
    own = [hash_architecture(network, size_in(network, network_of(SMALL))) for network in (wide, wider)]
    assert own[0] == own[1]
    assert hash_architecture(wide, wide.full_architecture()) not in own


def test_an_aggregation_with_a_new_network_ends_with_its_union(tmp_path: Path) -> None:
    """By the server's aggregation, with one client of the earlier union."""
    context = context_of(FedADP(choice="declared"))
    before = (make_retired(context), *begin_unions(context, SMALL))
    state = load_first_model(context, before)
    declared = context.get_declared(before[1])
    alone = replace(context, first=declared)
    blobs = BlobStore(tmp_path)
    client = store_update(alone, DrawnClient(name="ada", size=0), blobs)
    aggregated = aggregate_clients(context, blobs, state, 1, [client], None, before, (WIDE,))
    assert [lineage.id for lineage in aggregated.lineages] == ["", "union1", "union2"]
    assert aggregated.state.network_ids == ("union2",)
    assert aggregated.aggregated.network_ids == ("union1",)
    larger = aggregated.lineages[-1]
    views = Views(context=context, samples=torch.zeros(1))
    seen = []
    for lineage, model in ((before[1], aggregated.aggregated), (larger, aggregated.state)):
        participant = make_member(context, lineage, "ada", SMALL)
        seen.append(
            extract(
                context.get_declared(lineage).network, participant.architecture, views.of(model, participant).tensors
            )
        )
    for name, tensor in seen[0].items():
        torch.testing.assert_close(seen[1][name], tensor, rtol=1e-5, atol=1e-6)
