"""Clustered federated learning: when and how a cluster is split, and what its halves continue from."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import mostly_long
from server.aggregating import aggregate_clients
from server.server_rig import World, config, fleet

from subfleet.aggregation.aggregation import AggregatedModel
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.maps import tensor_maps
from subfleet.methods.aggregator import ClientUpdate, Participant
from subfleet.methods.roles import ClosedRound, RoundUpdates
from subfleet.methods.run_networks import StandingContext
from subfleet.methods.sattler import Clustering, Linkage, Sattler, SattlerMemory, compute_cosines, split_in_two
from subfleet.methods.selector import LastUpdate
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture
from subfleet.testing.rounds import (
    DrawnClient,
    draw_change,
    draw_state,
    make_assignee,
    make_context,
    play,
    store_update,
)
from subfleet.testing.submodels import have_same_bits
from subfleet.transport.blob_store import BlobStore

METHOD = Sattler(warmup_rounds=0, model="nested", mean_norm=1e6, max_norm=1e-6, least_half=1)  # splits all it can
Direction = dict[str, torch.Tensor]
NEW = SattlerMemory()
plan = cache(partial(make_context, METHOD))


def direction(seed: int, size: Architecture | None = None) -> Direction:
    """Draw a change of norm 1 of a submodel's tensors; with equal seeds, smaller submodels have the front of it."""
    network, generator = plan().network, torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(decl.shape, generator=generator) for name, decl in network.tensors.items()}
    maps = tensor_maps(network, size or plan().space[-1]).items()
    change = {name: tensor_map.extract(drawn[name]) for name, tensor_map in maps}
    norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in change.values()))
    return {name: tensor / norm for name, tensor in change.items()}


def update(name: str, change: Direction, size: Architecture | None = None, *, weight: float = 1.0) -> ClientUpdate:
    size = size or plan().space[-1]
    client = Participant(client_id=name, architecture=size, size=size)
    return ClientUpdate(client=client, weight=weight, received={}, change=change)


def scaled(factor: float, change: Direction) -> Direction:
    return {name: factor * tensor for name, tensor in change.items()}


def observe(method: Sattler, clients: list[ClientUpdate], memory: SattlerMemory = NEW, number: int = 1) -> Clustering:
    observe_updates, networks = method.roles().memory.observe, {"": plan().network}
    assert observe_updates
    updates = RoundUpdates(networks=networks, round=number, clients=tuple(clients), memory=memory)
    return cast("Clustering", observe_updates(updates))


def make_opposed(scale: float = 1.0) -> list[ClientUpdate]:
    """Return updates of three clients in one direction and two in the opposite; the mean is a fifth of each."""
    names = zip(("ada", "bob", "cyd", "dan", "eve"), (1, 1, 1, -1, -1), strict=True)
    return [update(name, scaled(side * scale, direction(1))) for name, side in names]


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 24), linkage=st.sampled_from(["complete", "single"]))
def test_groups_are_those_of_scikit_learn(seed: int, count: int, linkage: Linkage) -> None:
    from sklearn.cluster import AgglomerativeClustering

    drawn = np.random.default_rng(seed).random((count, count))
    similarity = np.triu(drawn, 1) + np.triu(drawn, 1).T  # no two are equal, so that ties do not matter
    reference = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage=linkage).fit(1 - similarity)
    groups = split_in_two(similarity, linkage)
    labels = np.zeros(count, int)
    labels[list(groups[1])] = 1
    assert sorted(groups[0] + groups[1]) == [*range(count)], "each client is in exactly one group"
    assert (labels == reference.labels_).all() or (labels == 1 - reference.labels_).all()


def test_cosines_are_those_of_the_changes() -> None:
    left, right = direction(1), direction(2)
    mixed = {name: 0.6 * left[name] + 0.8 * right[name] for name in left}
    clients = [
        update(str(index), change) for index, change in enumerate((left, scaled(-3.0, left), mixed, scaled(0.0, left)))
    ]
    flat = [torch.cat([tensor.flatten() for tensor in client.change.values()]).double() for client in clients]
    cosine = torch.nn.functional.cosine_similarity
    expected = [[float(cosine(a, b, dim=0)) if a.any() and b.any() else 0.0 for b in flat] for a in flat]
    np.testing.assert_allclose(compute_cosines(plan().network, clients), expected, atol=1e-6)


def test_unequal_submodels_are_compared_where_both_have_something() -> None:
    """The front of the larger change equals the smaller one, whatever lies behind it."""
    small = plan().space[0]
    clients = [update("whole", direction(1)), update("part", direction(1, small), small)]
    np.testing.assert_allclose(compute_cosines(plan().network, clients), np.ones((2, 2)), atol=1e-6)


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, True),
        ({"least_half": 2}, True),
        ({"least_half": 3}, False),
        ({"mean_norm": 0.19}, False),  # their mean moves by a fifth
        ({"mean_norm": 0.21}, True),
        ({"max_norm": 0.99}, True),
        ({"max_norm": 1.01}, False),
        ({"warmup_rounds": 2}, False),
        ({"warmup_rounds": 1}, True),
        ({"least_clients": 6}, False),
        ({"least_clients": 5}, True),
    ],
)
def test_a_cluster_is_split_where_its_clients_agree_on_nothing_more(changes: dict[str, Any], splits: bool) -> None:
    method = replace(METHOD, **{"mean_norm": 0.5, "max_norm": 0.5, **changes})
    outcome = observe(method, make_opposed(), number=2)
    halves = (("c1", ("ada", "bob", "cyd")), ("c2", ("dan", "eve")))
    assert outcome.splits == ({"": halves} if splits else {})


def test_relative_thresholds_are_shares_of_the_first_changes() -> None:
    method = replace(METHOD, norms="relative", mean_norm=0.25, max_norm=0.5)
    first = observe(method, make_opposed(8.0))
    assert first.first_norms[""] == pytest.approx(8.0)
    assert len(first.splits) == 1
    memory = SattlerMemory(first_norms=first.first_norms)
    assert len(observe(method, make_opposed(4.1), memory).splits) == 1
    assert observe(method, make_opposed(3.9), memory).splits == {}
    assert observe(replace(method, norms="absolute"), make_opposed(8.0)).splits == {}, "the mean moves by 1.6"


# --- one alone --------------------------------------------------------------------------------------------------------


def play_returning(method: Sattler, lie: Callable[[int, Direction], Direction]) -> tuple[int, SattlerMemory]:
    """Count the splits in 19 rounds of eight similar clients and one that returns under a new name in each round. The
    eight share a direction, have one of the same norm each to themselves, and learn less from round to round."""
    roles = method.roles()
    assert roles.memory.observe is not None
    assert roles.memory.remember is not None
    memory, splits, common = SattlerMemory(), 0, direction(0)
    for number in range(1, 20):
        learned = {f"c{index}": scaled(3.0 * 0.8**number, add(common, direction(index + 1))) for index in range(8)}
        changes = learned | {f"eve{number}": lie(number, scaled(3.0 * 0.8**number, common))}
        homes = {name: memory.clusters.get(name, find_largest(memory)) for name in changes}
        networks = {name: replace(plan().network, id=name) for name in set(homes.values())}
        sizes = {name: replace(plan().space[-1], network=home) for name, home in homes.items()}
        clients = tuple(update(name, change, sizes[name]) for name, change in changes.items())
        outcome = roles.memory.observe(RoundUpdates(networks=networks, round=number, clients=clients, memory=memory))
        closed = ClosedRound(round=number, clients={name: past(homes[name]) for name in homes}, observation=outcome)
        memory, splits = roles.memory.remember(memory, closed), splits + len(outcome.splits)
    return splits, memory


def find_largest(memory: SattlerMemory) -> str:
    return max(sorted(memory.sizes), key=memory.sizes.__getitem__, default="")


def add(left: Direction, right: Direction) -> Direction:
    return {name: left[name] + right[name] for name in left}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda number, learned: scaled(-8.0, learned), id="what makes the mean 0"),
        pytest.param(lambda number, learned: scaled(-6.0, learned), id="the opposite"),
        pytest.param(lambda number, learned: scaled(1.8, direction(99)), id="anything"),
        pytest.param(lambda number, learned: scaled(1.8, direction(1)), id="what is one member's own"),
        pytest.param(lambda number, learned: scaled(-2.5, direction(number % 8 + 1)), id="its opposite"),
    ],
)
@pytest.mark.parametrize("norms", mostly_long(["absolute", "relative"], "relative"))
def test_no_client_splits_a_cluster_that_agrees(norms: Any, lie: Callable[[int, Direction], Direction]) -> None:
    """This holds whatever the client sends, and under however many names it returns."""
    method = Sattler(warmup_rounds=0, norms=norms)
    method = replace(method, mean_norm=0.3, max_norm=0.5) if norms == "relative" else method
    splits, memory = play_returning(method, lie)
    assert splits == 0
    assert set(memory.clusters.values()) == {""}
    assert play_returning(replace(method, least_half=1), lie)[0] > 0, "the paper's rule splits them"


def test_a_single_deviating_client_does_not_keep_others_together() -> None:
    """Four learn one thing, three another, and the eighth the opposite of both: it is set aside, and they are split."""
    first, second = direction(1), direction(2)
    kinds = {**dict.fromkeys("abcd", first), **dict.fromkeys("efg", second), "z": scaled(-1.0, add(first, second))}
    clients = [update(name, change) for name, change in kinds.items()]
    method = replace(METHOD, mean_norm=0.9, max_norm=0.5)
    assert [names for _, names in observe(method, clients).splits[""]] == [(*"abcdefg",), ("z",)]
    halves = [names for _, names in observe(replace(method, least_half=2), clients).splits[""]]
    assert halves == [(*"abcd",), (*"efg",)]
    apart = replace(method, least_half=2, mean_norm=0.6)
    assert observe(apart, clients).splits == {}, "without it their mean moves by more than that"


def test_no_client_decides_by_many_names_where_newcomers_go() -> None:
    """A device was in c1 under nine names; most of the clients that trained last are in c2."""
    roles = METHOD.roles()
    assert roles.memory.remember is not None
    memory = SattlerMemory(clusters={"ada": "c1", "bob": "c2", "cyd": "c2"})
    for number in range(1, 10):
        homes = (
            {"ada": "c1", "bob": "c2", "cyd": "c2", f"eve{number}": "c1"} if number < 9 else {"bob": "c2", "cyd": "c2"}
        )
        clients = {name: past(network) for name, network in homes.items()}
        memory = roles.memory.remember(memory, ClosedRound(round=number, clients=clients))
    assert memory.sizes == {"c1": 2, "c2": 2}
    memory = roles.memory.remember(memory, ClosedRound(round=10, clients={"ada": past("c1")}))
    assert memory.sizes == {"c1": 1, "c2": 2}
    assert find_newcomers(memory) == "c2"


def assign(name: str, memory: SattlerMemory) -> Architecture:
    """Return the submodel that a client gets in a run with the clusters c1 and c2."""
    lineages = [Lineage(id=key, config=plan().config.model, born_round=1) for key in ("c1", "c2")]
    declared = [plan().get_declared(lineage) for lineage in lineages]
    assignee = make_assignee(plan(), name)
    assignee = replace(
        assignee,
        draw=replace(assignee.draw, memory=memory),
        networks={entry.network.id: entry.network for entry in declared},
        candidates=tuple(candidate for entry in declared for candidate in entry.candidates),
        estimate=lambda architecture: declared[architecture.network == "c2"].estimate(architecture),
    )
    candidate = plan().roles.assigner.assign(assignee).candidate
    assert candidate is not None
    return candidate.architecture


def find_newcomers(memory: SattlerMemory) -> str:
    """Return the cluster, c1 or c2, of a client that has not taken part yet."""
    return assign("new", memory).network


def test_the_mean_is_weighted_and_counts_only_those_who_hold_an_element() -> None:
    """Only one client holds the rest: there, two small clients that cancel each other leave its change alone."""
    small = plan().space[0]
    change = direction(1, small)
    clients = [
        update("ada", change, small, weight=1.0),
        update("bob", scaled(-1.0, change), small, weight=1.0),
        update("cyd", scaled(0.0, direction(2)), weight=5.0),
    ]
    assert len(observe(replace(METHOD, mean_norm=1e-3, max_norm=0.5), clients).splits) == 1
    heavier = [replace(clients[0], weight=3.0), *clients[1:]]
    assert observe(replace(METHOD, mean_norm=1e-3, max_norm=0.5), heavier).splits == {}


@pytest.mark.parametrize(
    "wrong",
    [{"mean_norm": 0.0}, {"max_norm": math.inf}, {"warmup_rounds": -1}, {"least_clients": 1}, {"least_half": 0}],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
        Sattler(**wrong)


# --- what follows -----------------------------------------------------------------------------------------------------


def aggregate_round(folder: Path, names: Mapping[str, float], memory: Any = None, **changes: Any) -> AggregatedModel:
    """Aggregate a round of clients with the whole model; each moves in one of two directions, drawn by its name."""
    context = make_context(replace(METHOD, **changes))
    blobs, size = BlobStore(folder), len(context.space) - 1
    drawn = (DrawnClient(name=name, size=size, scale=scale) for name, scale in names.items())
    clients = [store_update(context, client, blobs) for client in drawn]
    return aggregate_clients(context, blobs, draw_state(context.network), 1, clients, memory or SattlerMemory())


@pytest.mark.slow
def test_each_half_goes_on_with_what_its_own_clients_learned(tmp_path: Path) -> None:
    """Each half has exactly the bits of a run with its clients alone."""
    outcome = aggregate_round(tmp_path, {"ada": 1.0, "bob": 1.0, "cyd": 1.0, "dan": 1.0})
    halves = outcome.observation.splits[""]
    assert outcome.state.network_ids == ("c1", "c2")
    assert [(entry.id, entry.retired_round) for entry in outcome.lineages] == [("", 1), ("c1", None), ("c2", None)]
    for network_id, names in halves:
        alone = aggregate_round(tmp_path, dict.fromkeys(names, 1.0), warmup_rounds=9).state
        assert have_same_bits(outcome.state.of(network_id).shared, alone.shared)
    whole = aggregate_round(tmp_path, {"ada": 1.0, "bob": 1.0, "cyd": 1.0, "dan": 1.0}, warmup_rounds=9)
    assert have_same_bits(outcome.aggregated.shared, whole.state.shared), "the round is evaluated before the split"


def past(network: str) -> LastUpdate:
    size = replace(plan().space[-1], network=network)
    return LastUpdate(
        round=1,
        size=size,
        architecture=size,
        sample_count=1,
        epochs=1,
        loss=1.0,
        square_loss=1.0,
        change_norm=1.0,
        train_s=0.0,
        took_s=0.0,
    )


def test_absent_clients_join_the_larger_half() -> None:
    roles = METHOD.roles()
    assert roles.memory.remember is not None
    memory = SattlerMemory(
        clusters={"ada": "", "zoe": "", "yan": "c7"}, first_norms={"": 1.0, "c7": 2.0}, split_count=3
    )
    halves = (("c8", ("ada", "bob")), ("c9", ("cyd",)))
    clients = {name: past("") for name in ("ada", "bob", "cyd")}
    closed = ClosedRound(
        round=4, clients=clients, observation=Clustering(splits={"": halves}, first_norms=memory.first_norms)
    )
    after: SattlerMemory = roles.memory.remember(memory, closed)
    assert after.clusters == {"ada": "c8", "bob": "c8", "cyd": "c9", "zoe": "c8", "yan": "c7"}
    assert (after.split_count, after.first_norms) == (4, {"c7": 2.0})
    assert after.sizes == {"c8": 2, "c9": 1}
    assert roles.memory.remember(memory, replace(closed, observation=None)).clusters["bob"] == ""


def test_clients_of_a_split_cluster_have_the_same_submodel_of_their_half() -> None:
    standing = METHOD.roles().networks.standing
    assert standing is not None
    networks = {name: replace(plan().network, id=name) for name in ("c1", "c2")}
    memory = SattlerMemory(clusters={"ada": "c2", "bob": "c1"})
    for name, cluster in memory.clusters.items():
        client = Participant(client_id=name, architecture=plan().space[1], size=plan().space[1])
        context = StandingContext(seed=0, client=client, networks=networks, ready=lambda size: False, memory=memory)
        assert standing(context) == replace(plan().space[1], network=cluster)


def test_clients_have_the_sizes_of_their_cluster_and_newcomers_those_of_the_largest() -> None:
    memory = SattlerMemory(clusters={"ada": "c1", "bob": "c2", "cyd": "c2"}, sizes={"c1": 1, "c2": 2})
    for name, expected in (("ada", "c1"), ("bob", "c2"), ("new", "c2")):
        cluster = Lineage(id=expected, config=plan().config.model, born_round=1)
        assert assign(name, memory) == plan().get_declared(cluster).space[-1]


@pytest.mark.slow
def test_clusters_are_the_clients_that_learn_the_same(tmp_path: Path) -> None:
    """A whole run with fake devices that move towards one of two targets, and a server that is killed."""

    def move_towards(sign: float) -> Any:
        return lambda weights, task: {
            name: (0.5 * (sign - array)).astype(np.float32) for name, array in sorted(weights.items())
        }

    kinds = {"ada": 1.0, "bob": -1.0, "cyd": 1.0}
    behaviours = {name: replace(behaviour, change=move_towards(kinds[name])) for name, behaviour in fleet().items()}
    method = replace(METHOD, least_clients=2, model="largest", mean_norm=2.0, max_norm=2.0)
    results, deployed = [], dict[str, str]()
    for kills in (0, 6):
        world = World(tmp_path / str(kills), config(rounds=8, method=method), behaviours)
        for turn in range(1, 4000):
            if world.server.finished:
                break
            world.turn()
            if kills and turn % kills == 0:
                world.kill_server()
        results.append((world.model_bytes(), world.server.state.memory, world.server.result().networks))
        assert world.server.finished
        deployed = {row.client_id: row.architecture.split()[0] for row in world.server.result().deployed}
        assert deployed["ada"] == deployed["cyd"] != deployed["bob"]
    assert results[0] == results[1]
    assert cast("SattlerMemory", results[0][1]).clusters == deployed
    assert len(results[0][2]) == 3, "clients that agree are not split"


def test_without_a_split_it_is_a_plain_mean(tmp_path: Path) -> None:
    plain = make_context(replace(METHOD, warmup_rounds=9))
    clients, state = [DrawnClient(name=name, size=0) for name in ("ada", "bob")], draw_state(plain.network)
    moved = play(plain, state, clients, tmp_path).state
    first, second = (draw_change(plain, client, 1) for client in clients)
    maps = tensor_maps(plain.network, plain.space[0])
    for name, tensor in state.shared.items():
        expected = torch.zeros_like(tensor)
        if name in maps:
            maps[name].scatter((first[name] + second[name]) / 2, expected)
        torch.testing.assert_close(moved.shared[name] - tensor, expected, rtol=1e-4, atol=1e-6)
