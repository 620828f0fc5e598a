"""The clients of a round are a fair sample that depends on seed and round alone."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import context_of, training, update
from server.server_rig import World, config, fleet

from subfleet.methods.roles import ClosedRound
from subfleet.methods.selector import AvailableClient, SelectionContext, select_at_random
from subfleet.protocol.readings import Budget
from subfleet.rounds.coordinator import step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import AggregationRequest, RequestDone
from subfleet.rounds.work import AggregatedRound, CheckRequest
from subfleet.testing.rounds import with_steps


def draw(names: Iterable[str], count: int, *, seed: int, round_number: int, attempt: int = 0) -> tuple[str, ...]:
    """The clients that the default selector draws."""
    clients = tuple(AvailableClient(client_id=name, sample_count=1, budget=Budget(memory_bytes=1)) for name in names)
    selection = select_at_random(
        SelectionContext(clients=clients, count=count, round=round_number, attempt=attempt, seed=seed)
    )
    return tuple(sorted(selection.clients))


NAMES = st.sets(st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True), max_size=20)
SEEDS = st.integers(0, 2**32)


@pytest.mark.slow
@given(names=NAMES, count=st.integers(0, 25), seed=SEEDS, number=st.integers(1, 1000))
def test_it_is_a_sample_without_replacement(names: set[str], count: int, seed: int, number: int) -> None:
    sample = draw(names, count, seed=seed, round_number=number)
    assert len(sample) == len(set(sample)) == (min(count, len(names)) if count else len(names))
    assert set(sample) <= names
    assert list(sample) == sorted(sample)


@pytest.mark.slow
@given(names=NAMES, count=st.integers(0, 25), seed=SEEDS, order=st.randoms(use_true_random=False))
def test_no_order_makes_a_difference(names: set[str], count: int, seed: int, order: random.Random) -> None:
    shuffled = sorted(names)
    order.shuffle(shuffled)
    assert draw(shuffled, count, seed=seed, round_number=3) == draw(names, count, seed=seed, round_number=3)


@pytest.mark.slow
@given(names=NAMES.filter(bool), count=st.integers(1, 25), seed=SEEDS)
def test_removing_a_drawn_client_keeps_the_others_drawn(names: set[str], count: int, seed: int) -> None:
    before = draw(names, count, seed=seed, round_number=1)
    after = draw(names - {before[0]}, count, seed=seed, round_number=1)
    assert set(before) - {before[0]} <= set(after)


@pytest.mark.slow
def test_all_clients_are_drawn_equally_often() -> None:
    names = [f"c{number:02d}" for number in range(50)]
    counts = Counter(name for number in range(2000) for name in draw(names, 10, seed=7, round_number=number))
    # Binomial with mean 400 and a standard deviation of 17.9: 4.5 of them either way.
    assert set(counts) == set(names)
    assert 320 < min(counts.values()) <= max(counts.values()) < 480


def test_rounds_and_seeds_differ() -> None:
    names = [f"c{number:02d}" for number in range(50)]
    draws = {draw(names, 10, seed=seed, round_number=number) for seed in range(5) for number in range(5)}
    assert len(draws) == 25


@pytest.mark.slow
def test_only_drawn_clients_get_tasks(tmp_path: Path) -> None:
    world = World(tmp_path, config(rounds=4, clients_per_round=2, seed=3, deploy_targets=()), fleet())
    world.run()
    for record in world.notes.records:
        aggregated = tuple(row.client_id for row in record.clients if row.status == "aggregated")
        assert aggregated == draw(world.devices, 2, seed=3, round_number=record.round)
        assert [row.client_id for row in record.clients] == [*aggregated]
        assert record.idle == {"skipped: it was not drawn for this round": len(world.devices) - 2}


def test_a_configured_count_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="clients_per_round is -1, but must be 0 for all, or above 0"):
        config(clients_per_round=-1)
    assert config(clients_per_round=1).fingerprint() != config().fingerprint()


def test_methods_get_what_the_server_knows_and_not_what_clients_claim() -> None:
    """More samples than the profile has, and squares below the square of the mean, are not trusted."""
    closed: list[ClosedRound] = []

    def remember(memory: object, round_: ClosedRound) -> object:
        closed.append(round_)
        return memory

    context = context_of()
    context = replace(context, roles=with_steps(context.roles, remember=remember))
    state = training(context)
    claims = {"ada": replace(update(context, state, "ada"), sample_count=10**6, loss=2.0, square_loss=1.0)}
    claims["bob"] = replace(update(context, state, "bob"), sample_count=3, loss=2.0, square_loss=9.0)
    claims["cyd"] = replace(update(context, state, "cyd"), sample_count=4, loss=3.0, train_seconds=1e6, seconds=1e6)
    for name, claim in claims.items():
        state, _ = step(context, state, RequestDone(request=CheckRequest(update=claim), result=ChangeSize()), 5.0)
        trained = state.clients[name].trained
        assert trained is not None
        assert trained.took_s == 3.0, "since second 2, by the server's clock"
    step(
        context,
        state,
        RequestDone(
            request=AggregationRequest(round=1, clients=()),
            result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
        ),
        6.0,
    )
    known = closed[0].clients
    assert {name: (past.sample_count, past.square_loss, past.took_s) for name, past in known.items()} == {
        "ada": (10, 4.0, 3.0),
        "bob": (3, 9.0, 3.0),
        "cyd": (4, 9.0, 3.0),
    }
