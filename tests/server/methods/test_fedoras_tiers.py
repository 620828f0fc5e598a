"""FedorAS: a search for each tier, and fine-tuning of what it finds."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from server.methods.test_fedoras import CONTEXT, MODEL, NETWORK, context_of

from subfleet.elastic.cost import estimate_cost, part_costs
from subfleet.elastic.lineage import Chosen, Drawn, Lineage
from subfleet.elastic.robust_aggregation import CoordinateMedian
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods.aggregator import Participant
from subfleet.methods.assigner import Assignment
from subfleet.methods.fedoras import FedorAS, draw_tier
from subfleet.methods.run_networks import Generation, StandingContext
from subfleet.methods.selector import AvailableClient, SelectionContext
from subfleet.methods.tier_search import TierMemory, TierSearch, get_tier, list_network_tiers
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.readings import Budget
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.search.supernets import EvolutionSettings
from subfleet.settings.samples import DataSettings
from subfleet.testing.rounds import make_assignee, make_config

# --- stages two and three ---------------------------------------------------------------------------------------------


def search_lineages(context: RunContext) -> tuple[Lineage, ...]:
    """The networks of a search in which each tier scored one path."""
    search = context.roles.networks.path_search
    assert search is not None
    memory = TierMemory()
    for tier, path in enumerate((("identity",) * 4, ("dsconv3",) * 4, ("mbconv3_double",) * 4), start=1):
        generation = Generation(number=tier, tier=tier, paths=(path,))
        memory = search.record(memory, generation, (0.5,))
    return tuple(search.conclude(memory, NETWORK, 4))


def assign_tuning(context: RunContext, forward_macs: int | None, number: int = 1) -> Assignment:
    """Return the assignment of a client after the search for the tiers' networks."""
    declared = [context.get_declared(lineage) for lineage in search_lineages(context)]
    assignee = replace(
        make_assignee(context, "ada", round_number=number),
        networks={entry.network.id: entry.network for entry in declared},
        candidates=tuple(candidate for entry in declared for candidate in entry.candidates),
        budget=Budget(memory_bytes=2**40, forward_macs=forward_macs),
    )
    return context.roles.assigner.assign(assignee)


def test_clients_of_a_tier_and_above_fine_tune_its_network() -> None:
    sizes = [CONTEXT.get_declared(lineage).network.full_architecture() for lineage in search_lineages(CONTEXT)]
    macs = [
        estimate_cost(CONTEXT.get_declared(lineage).network, size, batch_size=1).forward_macs
        for lineage, size in zip(search_lineages(CONTEXT), sizes, strict=True)
    ]
    assert [get_tier(size) for size in sizes] == [1, 2, 3]
    for limit, expected in ((macs[0], {1}), (macs[1], {1, 2}), (macs[2], {1, 2, 3}), (None, {1, 2, 3})):
        drawn = [assign_tuning(CONTEXT, limit, number).candidate for number in range(40)]
        assert {get_tier(candidate.architecture) for candidate in drawn if candidate is not None} == expected
    assert assign_tuning(CONTEXT, macs[0] - 1).candidate is None


def test_each_tiers_network_has_rounds_of_its_own() -> None:
    """Fine-tuning is federated averaging of one network, by clients of its tier and above (section 3.3)."""
    context = context_of(tiers=3, supernet_rounds=4)
    declared = [context.get_declared(lineage) for lineage in search_lineages(context)]
    networks = {entry.network.id: entry.network for entry in declared}
    macs = [sum(part_macs for _, part_macs in part_costs(network).values()) for network in networks.values()]
    clients = tuple(
        AvailableClient(
            client_id=f"{name}{index}", sample_count=9, budget=Budget(memory_bytes=2**40, forward_macs=limit)
        )
        for name, limit in (("slow", macs[0]), ("middle", macs[1]), ("fast", None))
        for index in range(3)
    )
    select = context.roles.selector.select
    assert select is not None
    for number in range(5, 11):
        tier = (number - 5) % 3 + 1
        selection_context = SelectionContext(clients=clients, count=0, round=number, networks=networks)
        able = ("slow", "middle", "fast")[tier - 1 :]
        assert sorted(select(selection_context).clients) == sorted(
            client.client_id for client in clients if client.client_id[:-1] in able
        )
        candidate = assign_tuning(context, None, number).candidate
        assert candidate is not None
        assert get_tier(candidate.architecture) == tier
    none_fast = SelectionContext(clients=clients[:3], count=0, round=7, networks=networks)
    assert len(select(none_fast).clients) == 3, (
        "where no client can train a tier's network, its round goes to the next lower tier"
    )
    supernet = SelectionContext(clients=clients, count=2, round=3, networks={"": context.network})
    assert len(select(supernet).clients) == 2


def test_of_drawn_tiers_nobody_trains_a_network_above_its_own() -> None:
    context = context_of(tiers_by="drawn", tiers=3)
    own = draw_tier(context.config.seed, "ada", 3)
    drawn = [assign_tuning(context, None, number).candidate for number in range(40)]
    assert {get_tier(candidate.architecture) for candidate in drawn if candidate is not None} == set(range(1, own + 1))


@pytest.mark.parametrize("by", ["drawn", "measured"])
def test_each_client_is_left_with_the_network_of_its_tier(by: str) -> None:
    context = context_of(tiers_by=by, tiers=3)
    networks = {lineage.id: context.get_declared(lineage).network for lineage in search_lineages(context)}
    standing, tiers = context.roles.networks.standing, set[int]()
    assert standing is not None
    whole = context.network.full_architecture()
    for name in (f"client-{number}" for number in range(20)):
        client = Participant(client_id=name, architecture=whole, size=whole)
        tier = draw_tier(context.config.seed, name, 3) if by == "drawn" else 3
        for ready in ({1, 2, 3}, {1, 2}, {1}, set[int]()):
            standing_context = StandingContext(
                seed=context.config.seed,
                client=client,
                networks=networks,
                ready=lambda size, ready=ready: get_tier(size) in ready,  # type: ignore[misc]
            )
            assert get_tier(standing(standing_context)) == max(
                [ready_tier for ready_tier in ready if ready_tier <= tier], default=1
            )
        tiers.add(tier)
    assert tiers == ({1, 2, 3} if by == "drawn" else {3})


@pytest.mark.parametrize(("start", "kind"), [("supernet", Chosen), ("fresh", Drawn)])
def test_networks_begin_with_the_supernets_weights_or_with_fresh_ones(start: str, kind: type) -> None:
    context = context_of(start=start)
    lineages = search_lineages(context)
    assert [lineage.id for lineage in lineages] == ["t1", "t2", "t3"]
    assert all(isinstance(lineage.map, kind) for lineage in lineages)
    assert all((lineage.parent, lineage.born_round) == ("", 4) for lineage in lineages)


def test_fine_tuning_has_rates_of_its_own_that_fall_to_a_tenth() -> None:
    """Two tiers take turns, and both have the same rates."""
    context = context_of(tiers=2, supernet_rounds=5, tuning_rounds=10, tuning_epochs=3, tuning_learning_rate=0.02)
    settings = TrainingSettings(epochs=2, learning_rate=0.1)
    assert context.roles.training.for_round(settings, 5) == settings
    tuning_rates = [context.roles.training.for_round(settings, number).learning_rate for number in range(6, 34)]
    assert tuning_rates[::2] == tuning_rates[1::2]
    rates = tuning_rates[::2]
    assert rates[0] == pytest.approx(0.02)
    assert rates[5] == pytest.approx(0.02 * 0.55)
    assert rates[10:] == pytest.approx([0.002] * 4)
    assert all(earlier >= later for earlier, later in pairwise(rates))
    assert context.roles.training.for_round(settings, 6).epochs == 3


def test_a_search_is_due_once_after_the_last_round_of_the_supernet() -> None:
    search = context_of(supernet_rounds=7).roles.networks.path_search
    assert search is not None
    assert [number for number in range(12) if search.is_due(TierMemory(), number)] == [7]


@pytest.mark.slow
@pytest.mark.parametrize("objectives", ["accuracy", "accuracy_macs"])
def test_every_tiers_best_path_lies_in_its_bracket(objectives: Literal["accuracy", "accuracy_macs"]) -> None:
    """O7."""
    evolution = EvolutionSettings(evaluations=12, population=6, offspring=6, objectives=objectives)
    context = context_of(tiers=3, search=TierSearch(evolution=evolution))
    search, memory = context.roles.networks.path_search, TierMemory()
    assert search is not None
    while generation := search.propose(memory, NETWORK, 3):
        scores = tuple(float(len(set(path))) for path in generation.paths)
        memory = search.record(memory, generation, scores)
    lineages = search.conclude(memory, NETWORK, 4)
    assert [lineage.id for lineage in lineages] == ["t1", "t2", "t3"]
    for lineage, tier in zip(lineages, list_network_tiers(NETWORK, 3), strict=True):
        network = context.get_declared(lineage).network
        macs = estimate_cost(network, network.full_architecture(), batch_size=1).forward_macs
        assert tier.low_macs <= macs <= tier.high_macs


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"subspace": 0.0}, "subspace is 0.0, but must be above 0"),
        ({"subspace": 1.5}, "subspace is 1.5, but must be above 0"),
        ({"supernet_rounds": 0}, "supernet_rounds is 0, but must be 1 or more"),
        ({"min_contributors": 0}, "min_contributors is 0, but must be 1 or more"),
        ({"tuning_learning_rate": math.inf}, "tuning_learning_rate is inf"),
    ],
)
def test_settings_out_of_their_range_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedorAS(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"robust_aggregation": CoordinateMedian()}, "aggregates each operator by the examples that went through it"),
        ({"distillation": DistillationSettings(iterations=2)}, "a supernet, which cannot predict"),
        (
            {"norms": "calibrated", "model": replace(MODEL, norm="batch")},
            "is a supernet, and devices measure the norms of a whole network only",
        ),
        ({"data": DataSettings(test="unused")}, "data.validation_samples is 0"),
        ({"model": replace(MODEL, operators=(("conv3",),))}, "the model offers no choice of them"),
    ],
)
def test_what_does_not_go_with_a_supernet_is_refused(settings: dict[str, Any], words: str) -> None:
    options = {"model": MODEL, "data": DataSettings(test="unused", validation_samples=1), **settings}
    with pytest.raises(ValueError, match=words):
        make_config(FedorAS(), **options)
