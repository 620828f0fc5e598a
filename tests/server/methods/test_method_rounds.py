"""What every method promises of a round."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from server.methods.method_cases import (
    QUICK,
    Client,
    every_size,
    first_state,
    held,
    logits,
    moves_the_whole,
    plan_with,
    play,
    same_bits,
    seen,
)

from subfleet.elastic.model_state import packed, unpacked
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.policies import as_folded

SHARED = {"heterofl", "fedavg", "fedprox", "fjord", "fedrolex", "federated_dropout"}
"""Methods that keep one model for all and change nothing but by their clients' updates."""


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS.keys())
def test_a_round_with_learning_rate_0_changes_nothing_for_anybody(kind: type[AnyMethod], tmp_path: Path) -> None:
    plan = plan_with(kind())
    plan = replace(plan, policies=replace(plan.policies, distillation=None))
    state = first_state(plan.network)
    clients = [replace(client, scale=0.0) for client in every_size(plan)]
    folded = play(plan, state, clients, tmp_path).state
    if moves_the_whole(plan):
        assert logits(plan, folded.shared) == pytest.approx(logits(plan, state.shared), abs=1e-4)
        return
    assert same_bits(folded.shared, state.shared)
    for client in clients:
        assert same_bits(seen(plan, folded, client), state.shared)


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS.keys())
def test_what_nobody_held_keeps_its_bits(kind: type[AnyMethod], tmp_path: Path) -> None:
    plan = plan_with(kind())
    if moves_the_whole(plan):
        plan = replace(plan, policies=replace(plan.policies, after_round=as_folded, distillation=None))
    state, clients = first_state(plan.network), every_size(plan)[:2]
    for round_number in (1, 2):
        folded = play(plan, state, clients, tmp_path, round_number)
        assert not folded.refused
        kept = held(plan, clients, round_number)
        if kind.TYPE == "fedfa":  # grafting also moves the blocks that clients lack
            kept = {name: tensor | (plan.network.tensors[name].block is not None) for name, tensor in kept.items()}
        for name, tensor in folded.state.shared.items():
            assert torch.equal(tensor[~kept[name]], state.shared[name][~kept[name]])
        moved = any(
            not torch.equal(seen(plan, folded.state, client)[name], seen(plan, state, client)[name])
            for client in clients
            for name in state.shared
        )
        assert moved


@pytest.mark.parametrize("name", QUICK)
def test_the_order_of_clients_does_not_matter_and_the_state_survives_a_crash(name: str, tmp_path: Path) -> None:
    plan = plan_with(QUICK[name])
    state, clients = first_state(plan.network), every_size(plan)
    there = play(plan, state, clients, tmp_path).state
    back = play(plan, unpacked(packed(state)), clients[::-1], tmp_path).state
    assert same_bits(packed(there), packed(back))
    again = unpacked(packed(there))
    one, other = (play(plan, start, clients, tmp_path, 2).state for start in (there, again))
    assert same_bits(packed(one), packed(other))


@pytest.mark.parametrize("name", sorted(SHARED - {"fedavg", "fedprox"}))
def test_clients_of_the_whole_model_equal_fedavg(name: str, tmp_path: Path) -> None:
    kind = METHODS[name]
    method = kind(weighting="samples") if name in ("heterofl", "fedrolex") else kind()  # type: ignore[call-arg]
    plan, reference = plan_with(method), plan_with(FedAvg())
    clients = [Client(name=name, size=len(plan.space) - 1, samples=count) for name, count in (("a", 3), ("b", 8))]
    whole = [replace(client, size=0) for client in clients]
    state = first_state(plan.network)
    folded = play(plan, state, clients, tmp_path).state.shared
    assert same_bits(folded, play(reference, state, whole, tmp_path).state.shared)
