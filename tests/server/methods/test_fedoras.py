"""FedorAS: what clients are sent, how operators fold (O1, O2), and who fine-tunes what."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from subfleet.elastic.cost import Costs, estimate_cost, part_costs
from subfleet.elastic.families.records.choices import ChoiceCnn
from subfleet.elastic.lineage import Chosen, Drawn, Lineage
from subfleet.elastic.merges import CoordinateMedian
from subfleet.elastic.network import Network
from subfleet.elastic.paths import path_spec
from subfleet.elastic.teaching import DistillationSettings
from subfleet.folding.folding import Folding
from subfleet.methods.asking import Unfit, Written
from subfleet.methods.evolving import Standing
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.path_search import Generation, Proposing, ScoredGeneration
from subfleet.methods.policies import Assigned, Participant
from subfleet.methods.selecting import Available, Selecting
from subfleet.methods.subspacing import drawn_tier, supernet_tiers
from subfleet.methods.tier_search import TierMemory, TierSearch, tier_of
from subfleet.protocol.chains import Chain, Link, LinkOperator
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.terms import Terms
from subfleet.search.path_evolution import EvolutionSettings
from subfleet.search.tiers import tier_for
from subfleet.settings.samples import DataSettings
from subfleet.testing.rounds import Client, ask, change_of, config_with, first_state, seat_of, terms_with
from subfleet.transport.blob_store import BlobStore

MODEL = ChoiceCnn(
    input_shape=(1, 8, 8),
    class_count=4,
    widths=(4, 8),
    depths=(2, 2),
    last_widths=(4,),
    operators=(("conv1", "conv3", "dsconv3", "mbconv3_double", "identity"),),
    group_size=2,
)
CLIENTS = tuple(Client(name=name, size=0, samples=samples) for name, samples in (("ada", 10), ("bob", 30), ("cyd", 20)))
FLOAT_BYTES = 4
Counts = Mapping[str, Mapping[str, int]]


def terms_of(**settings: object) -> Terms:
    data = DataSettings(test="unused", validation_samples=1)
    return terms_with(FedorAS(**settings), MODEL, data=data)  # type: ignore[arg-type]


TERMS = terms_of()
NETWORK = TERMS.network
CHOICES = tuple(NETWORK.choices)


# --- how operators fold -----------------------------------------------------------------------------------------------


def folded(terms: Terms, drawn: Sequence[Counts], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model before and after a round in which these many examples of each client went through its operators."""
    state, blobs, seats = first_state(terms.network), BlobStore(folder), []
    for client, counts in zip(CLIENTS, drawn, strict=True):
        examples: OperatorExamples = tuple((name, tuple(own.items())) for name, own in counts.items())
        seat = seat_of(terms, client, blobs)
        assert seat.result is not None
        seats.append(replace(seat, result=replace(seat.result, operator_examples=examples)))
    found = Folding(terms=terms, blobs=blobs).fold(state, 1, seats, terms.policies.memory)
    assert not found.refused
    return dict(state.shared), dict(found.state.shared)


def mean_change(name: str, weights: Sequence[float]) -> Tensor:
    changes = [change_of(TERMS, client, 1)[name].double() for client in CLIENTS]
    total = math.fsum(weights)
    return sum((weight / total * one for weight, one in zip(weights, changes, strict=True)), torch.zeros(()).double())


def everywhere(operator: str, count: int) -> Counts:
    return {choice: {operator: count} for choice in CHOICES}


def test_with_one_operator_at_each_place_it_is_federated_averaging_by_examples(tmp_path: Path) -> None:
    """O1."""
    before, after = folded(TERMS, [everywhere("conv3", count) for count in (40, 120, 80)], tmp_path)
    path = NETWORK.shapes(path_spec(NETWORK, ["conv3"] * len(CHOICES)))
    for name, tensor in after.items():
        moved = tensor.double() - before[name].double()
        if name in path:
            torch.testing.assert_close(moved, mean_change(name, (40, 120, 80)), atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("least", [1, 2])
def test_an_operator_that_too_few_clients_drew_stays_to_the_bit(least: int, tmp_path: Path) -> None:
    """O2: the public code maps no searchable tensor to its operator, and never drops what one client alone trained."""
    terms = terms_of(min_contributors=least)
    drawn = [everywhere("conv1", 40), {**everywhere("conv1", 60), CHOICES[0]: {"conv3": 60}}, everywhere("conv1", 80)]
    before, after = folded(terms, drawn, tmp_path)
    for name, tensor in after.items():
        part = NETWORK.tensors[name].part
        alone = part == f"{CHOICES[0]}.conv3"
        drawn_by_two = part is None or part.endswith(".conv1")
        assert torch.equal(tensor, before[name]) == (not drawn_by_two and not (alone and least == 1))
        if alone and least == 1:
            moved = tensor.double() - before[name].double()
            torch.testing.assert_close(moved, mean_change(name, (0, 1, 0)), atol=1e-6, rtol=1e-5)


def test_each_operator_counts_by_its_own_examples_and_what_is_always_on_by_all(tmp_path: Path) -> None:
    """Equation 5."""
    shares = ((10, 30), (90, 30), (60, 0))
    drawn = [{choice: {"conv1": one, "dsconv3": other} for choice in CHOICES} for one, other in shares]
    before, after = folded(TERMS, drawn, tmp_path)
    for name, tensor in after.items():
        part = NETWORK.tensors[name].part
        moved = tensor.double() - before[name].double()
        if part is None:
            weights: Sequence[float] = [sum(own) for own in shares]
        elif part.endswith((".conv1", ".dsconv3")):
            weights = [own[part.endswith(".dsconv3")] for own in shares]
        else:
            assert torch.equal(tensor, before[name])
            continue
        torch.testing.assert_close(moved, mean_change(name, weights), atol=1e-6, rtol=1e-5)


def test_plain_averaging_counts_samples_whatever_was_drawn(tmp_path: Path) -> None:
    shares = ((10, 30), (90, 30), (60, 0))
    drawn = [{choice: {"conv1": one, "dsconv3": other} for choice in CHOICES} for one, other in shares]
    before, after = folded(terms_of(aggregation="clients"), drawn, tmp_path)
    for name, tensor in after.items():
        moved = tensor.double() - before[name].double()
        torch.testing.assert_close(moved, mean_change(name, [one.samples for one in CLIENTS]), atol=1e-6, rtol=1e-5)


# --- what clients are sent --------------------------------------------------------------------------------------------


def given(terms: Terms, name: str = "ada", **budget: int) -> Assigned:
    asked = ask(terms, name)
    return terms.policies.assign(replace(asked, budget=replace(asked.budget, **budget)))


def parts_of(terms: Terms) -> Mapping[str, tuple[int, int]]:
    return Costs(terms.network).of_parts(terms.network.full_spec())


def operator_bytes(terms: Terms, spec: SubnetSpec) -> int:
    parts = parts_of(terms)
    return FLOAT_BYTES * sum(parts[part][0] for part in terms.network.parts_of(spec))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_subspace_keeps_to_its_share_and_is_another_for_each_client(share: float) -> None:
    terms = terms_of(subspace=share)
    whole, found = operator_bytes(terms, NETWORK.full_spec()), list[SubnetSpec]()
    for number in range(20):
        assigned = given(terms, f"client-{number}")
        assert assigned.placed is not None
        assert assigned.candidate is not None
        assert assigned.candidate.spec.spec_id == NETWORK.full_spec().spec_id  # whose program chains whatever is drawn
        assert operator_bytes(terms, assigned.placed) <= share * whole
        kept = terms.network.operators_of(assigned.placed)
        assert all("identity" in own for own in kept.values())
        found.append(assigned.placed)
    different = len({one.choices for one in found})
    assert different == 1 if share == 1 else different > 10


def test_the_link_has_to_have_room_for_the_subspace() -> None:
    always = FLOAT_BYTES * parts_of(TERMS)[""][0]
    assigned = given(TERMS, uplink_bytes=always + 2000)
    assert assigned.placed is not None
    assert operator_bytes(TERMS, assigned.placed) <= 2000
    refused = given(TERMS, uplink_bytes=always - 1)
    assert refused.candidate is None
    assert refused.reason.startswith("no subspace of the supernet fits")


def test_an_operator_that_no_path_within_the_multiplications_has_is_not_sent() -> None:
    parts = parts_of(TERMS)
    heaviest = max(parts[f"{CHOICES[0]}.{one}"][1] for one in NETWORK.choices[CHOICES[0]].operators)
    most = parts[""][1] + heaviest - 1
    for number in range(10):
        assigned = given(TERMS, f"client-{number}", forward_macs=most)
        assert assigned.placed is not None
        assert assigned.paths is not None
        assert assigned.paths.forward_macs == min(most, tier_for(supernet_tiers(NETWORK, 4), most).high_macs)
        kept = NETWORK.operators_of(assigned.placed)
        assert all(parts[""][1] + parts[f"{name}.{one}"][1] <= most for name, own in kept.items() for one in own)
    assert given(TERMS, forward_macs=parts[""][1] - 1).candidate is None


def test_a_device_that_cannot_load_the_supernets_program_is_not_given_it_again() -> None:
    asked = ask(TERMS, "ada")
    (whole,) = asked.candidates
    written = Written(size=whole.spec, planned_peak_bytes=1, chain=chain_of(NETWORK))
    told = replace(asked, written={whole.spec.spec_id: written})
    assert TERMS.policies.assign(told).candidate is not None
    refused = TERMS.policies.assign(
        replace(told, refused={whole.spec.spec_id: Unfit(limit="runtime", why="it lacks Erf")})
    )
    assert (refused.candidate, refused.reason) == (None, "the supernet was refused by the device: it lacks Erf")


def chain_of(network: Network) -> Chain:
    links = tuple(
        Link(
            name=name,
            operators=tuple(LinkOperator(name=one, piece="", prefix=f"{name}.{one}.") for one in choice.operators),
        )
        for name, choice in network.choices.items()
    )
    return Chain(links=links, fixed_bytes=0, runtime_bytes=())


def test_without_memory_for_the_leanest_path_nothing_is_sent() -> None:
    refused = given(TERMS, memory_bytes=1000)
    assert refused.candidate is None
    assert "1000 bytes of memory" in refused.reason


def test_a_drawn_tier_is_a_clients_own_for_the_whole_run_and_bounds_its_multiplications() -> None:
    terms = terms_of(tiers_by="drawn", tiers=3)
    tiers = supernet_tiers(NETWORK, 3)
    found = set()
    for number in range(30):
        asked = ask(terms, f"client-{number}")
        tier = drawn_tier(asked.draw.seed, asked.draw.client_id, 3)
        paths = terms.policies.assign(asked).paths
        assert paths is not None
        assert paths.forward_macs == tiers[tier - 1].high_macs
        found.add(tier)
    assert found == {1, 2, 3}


# --- stages two and three ---------------------------------------------------------------------------------------------


def found_by(terms: Terms) -> tuple[Lineage, ...]:
    """The networks of a search in which each tier scored one path."""
    search = terms.policies.path_search
    assert search is not None
    memory = TierMemory()
    for tier, path in enumerate((("identity",) * 4, ("dsconv3",) * 4, ("mbconv3_double",) * 4), start=1):
        generation = Generation(number=tier, tier=tier, paths=(path,))
        memory = search.scored(memory, ScoredGeneration(generation=generation, scores=(0.5,)))
    return tuple(search.found(memory, NETWORK, 4))


def tuning(terms: Terms, forward_macs: int | None, number: int = 1) -> Assigned:
    """What a client is given once the tiers' networks have been found."""
    declared = [terms.declared(one) for one in found_by(terms)]
    asked = replace(
        ask(terms, "ada", round_number=number),
        networks={one.network.id: one.network for one in declared},
        candidates=tuple(candidate for one in declared for candidate in one.candidates),
        budget=Budget(memory_bytes=2**40, forward_macs=forward_macs),
    )
    return terms.policies.assign(asked)


def test_clients_of_a_tier_and_above_fine_tune_its_network() -> None:
    sizes = [TERMS.declared(one).network.full_spec() for one in found_by(TERMS)]
    macs = [
        estimate_cost(TERMS.declared(one).network, size, batch_size=1).forward_macs
        for one, size in zip(found_by(TERMS), sizes, strict=True)
    ]
    assert [tier_of(one) for one in sizes] == [1, 2, 3]
    for most, expected in ((macs[0], {1}), (macs[1], {1, 2}), (macs[2], {1, 2, 3}), (None, {1, 2, 3})):
        drawn = [tuning(TERMS, most, number).candidate for number in range(40)]
        assert {tier_of(one.spec) for one in drawn if one is not None} == expected
    assert tuning(TERMS, macs[0] - 1).candidate is None


def test_each_tiers_network_has_rounds_of_its_own() -> None:
    """Fine-tuning is federated averaging of one network, by clients of its tier and above (section 3.3)."""
    terms = terms_of(tiers=3, supernet_rounds=4)
    declared = [terms.declared(one) for one in found_by(terms)]
    networks = {one.network.id: one.network for one in declared}
    macs = [sum(own for _, own in part_costs(one).values()) for one in networks.values()]
    clients = tuple(
        Available(client_id=f"{name}{place}", sample_count=9, budget=Budget(memory_bytes=2**40, forward_macs=most))
        for name, most in (("slow", macs[0]), ("middle", macs[1]), ("fast", None))
        for place in range(3)
    )
    select = terms.policies.select
    assert select is not None
    for number in range(5, 11):
        tier = (number - 5) % 3 + 1
        asked = Selecting(clients=clients, count=0, round=number, networks=networks)
        able = ("slow", "middle", "fast")[tier - 1 :]
        assert sorted(select(asked).clients) == sorted(one.client_id for one in clients if one.client_id[:-1] in able)
        found = tuning(terms, None, number).candidate
        assert found is not None
        assert tier_of(found.spec) == tier
    none_fast = Selecting(clients=clients[:3], count=0, round=7, networks=networks)
    assert len(select(none_fast).clients) == 3, "where nobody can train a tier's, its round is the next lower one's"
    supernet = Selecting(clients=clients, count=2, round=3, networks={"": terms.network})
    assert len(select(supernet).clients) == 2


def test_of_drawn_tiers_nobody_trains_a_network_above_its_own() -> None:
    terms = terms_of(tiers_by="drawn", tiers=3)
    own = drawn_tier(terms.config.seed, "ada", 3)
    drawn = [tuning(terms, None, number).candidate for number in range(40)]
    assert {tier_of(one.spec) for one in drawn if one is not None} == set(range(1, own + 1))


@pytest.mark.parametrize("by", ["drawn", "measured"])
def test_each_client_is_left_with_the_network_of_its_tier(by: str) -> None:
    terms = terms_of(tiers_by=by, tiers=3)
    networks = {one.id: terms.declared(one).network for one in found_by(terms)}
    standing, left = terms.policies.standing, set[int]()
    assert standing is not None
    whole = terms.network.full_spec()
    for name in (f"client-{number}" for number in range(20)):
        client = Participant(client_id=name, spec=whole, size=whole)
        tier = drawn_tier(terms.config.seed, name, 3) if by == "drawn" else 3
        for ready in ({1, 2, 3}, {1, 2}, {1}, set[int]()):
            asked = Standing(
                seed=terms.config.seed,
                client=client,
                networks=networks,
                ready=lambda size, ready=ready: tier_of(size) in ready,  # type: ignore[misc]
            )
            assert tier_of(standing(asked)) == max([one for one in ready if one <= tier], default=1)
        left.add(tier)
    assert left == ({1, 2, 3} if by == "drawn" else {3})


@pytest.mark.parametrize(("start", "kind"), [("supernet", Chosen), ("fresh", Drawn)])
def test_networks_begin_with_the_supernets_weights_or_with_fresh_ones(start: str, kind: type) -> None:
    terms = terms_of(start=start)
    found = found_by(terms)
    assert [one.id for one in found] == ["t1", "t2", "t3"]
    assert all(isinstance(one.map, kind) for one in found)
    assert all((one.parent, one.born_round) == ("", 4) for one in found)


def test_fine_tuning_has_rates_of_its_own_that_fall_to_a_tenth() -> None:
    """Two tiers in turns: each has the same rates, one round after the other."""
    terms = terms_of(tiers=2, supernet_rounds=5, tuning_rounds=10, tuning_epochs=3, tuning_learning_rate=0.02)
    settings = TrainingSettings(epochs=2, learning_rate=0.1)
    assert terms.policies.training(settings, 5) == settings
    both = [terms.policies.training(settings, number).learning_rate for number in range(6, 34)]
    assert both[::2] == both[1::2]
    rates = both[::2]
    assert rates[0] == pytest.approx(0.02)
    assert rates[5] == pytest.approx(0.02 * 0.55)
    assert rates[10:] == pytest.approx([0.002] * 4)
    assert all(one >= other for one, other in pairwise(rates))
    assert terms.policies.training(settings, 6).epochs == 3


def test_a_search_comes_once_behind_the_last_round_of_the_supernet() -> None:
    search = terms_of(supernet_rounds=7).policies.path_search
    assert search is not None
    assert [number for number in range(12) if search.due(TierMemory(), number)] == [7]


@pytest.mark.parametrize("objectives", ["accuracy", "accuracy_macs"])
def test_every_tiers_best_path_lies_in_its_bracket(objectives: Literal["accuracy", "accuracy_macs"]) -> None:
    """O7."""
    evolution = EvolutionSettings(evaluations=12, population=6, offspring=6, objectives=objectives)
    terms = terms_of(tiers=3, search=TierSearch(evolution=evolution))
    search, memory = terms.policies.path_search, TierMemory()
    assert search is not None
    while generation := search.propose(Proposing(network=NETWORK, memory=memory, seed=3)):
        scores = tuple(float(len(set(path))) for path in generation.paths)
        memory = search.scored(memory, ScoredGeneration(generation=generation, scores=scores))
    found = search.found(memory, NETWORK, 4)
    assert [one.id for one in found] == ["t1", "t2", "t3"]
    for one, tier in zip(found, supernet_tiers(NETWORK, 3), strict=True):
        network = terms.declared(one).network
        macs = estimate_cost(network, network.full_spec(), batch_size=1).forward_macs
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
        ({"merge": CoordinateMedian()}, "folds each operator by the examples that went through it"),
        ({"distillation": DistillationSettings(iterations=2)}, "a supernet, which predicts nothing"),
        (
            {"norms": "calibrated", "model": replace(MODEL, norm="batch")},
            "has no one network whose norms",
        ),
        ({"data": DataSettings(test="unused")}, "data.validation_samples is 0"),
        ({"model": replace(MODEL, operators=(("conv3",),))}, "the model has no choice of them"),
    ],
)
def test_what_does_not_go_with_a_supernet_is_refused(settings: dict[str, Any], words: str) -> None:
    given = {"model": MODEL, "data": DataSettings(test="unused", validation_samples=1), **settings}
    with pytest.raises(ValueError, match=words):
        config_with(FedorAS(), **given)
