"""Accuracy of the model on devices' own data: its spread over the devices, and methods that select by it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import CLIENTS
from server.server_rig import World, config, fleet
from server.test_evaluations import EACH, HELD_OUT

from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow, describe_spread
from subfleet.methods.power_of_choice import ChoiceMemory, PowerOfChoice
from subfleet.methods.selector import AvailableClient, SelectionContext
from subfleet.protocol.answers import Evaluated
from subfleet.protocol.readings import Budget

# --- spread -------------------------------------------------------------------------------------------------------


def record_of(*rows: tuple[str, str, float]) -> EvaluationRecord:
    clients = (
        EvaluationRow(
            client_id=name,
            device=tier,
            architecture="",
            architecture_id="",
            accuracy=value,
            loss=value,
            sample_count=1,
            label_count=1,
        )
        for name, tier, value in rows
    )
    return EvaluationRecord(round=4, seconds=1.0, clients=tuple(clients))


def test_a_spread_by_hand() -> None:
    record = record_of(("a", "pi", 0.2), ("b", "pi", 0.8), ("c", "phone", 0.6), ("d", "phone", 0.2), ("e", "jet", 1.0))
    left_out = replace(record.clients[0], client_id="z", accuracy=0.0, label_count=0, status="missing: no answer")
    spread = replace(record, clients=(*record.clients, left_out)).spread()
    assert spread is not None
    assert (spread.clients, spread.lower_quartile, spread.upper_quartile) == (5, 0.2, 0.8)
    assert spread.mean == pytest.approx(0.56)
    assert (spread.worst, spread.worst_client, spread.worst_tier) == (0.2, "a", "phone")
    assert spread.tiers == {"jet": 1.0, "phone": pytest.approx(0.4), "pi": pytest.approx(0.5)}
    loss = record.spread("loss")
    assert loss is not None
    assert (loss.worst, loss.worst_client, loss.worst_tier) == (1.0, "e", "jet"), "of losses the largest is worst"
    assert describe_spread(record) == (
        "after round 4 the mean accuracy on held-out samples of their own is 0.5600 over 5 devices, middle half 0.2000 "
        "to 0.8000, worst a 0.2000, worst tier phone 0.4000"
    )
    assert record_of().spread() is None
    assert "no device has evaluated" in describe_spread(record_of())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_quartiles_are_those_of_numpy(values: list[float]) -> None:
    spread = record_of(*((f"c{index}", f"t{index % 3}", value) for index, value in enumerate(values))).spread()
    assert spread is not None
    assert [spread.lower_quartile, spread.upper_quartile] == pytest.approx(np.percentile(values, [25, 75]))
    assert spread.interquartile_range == pytest.approx(float(np.subtract(*np.percentile(values, [75, 25]))))
    assert spread.mean == pytest.approx(float(np.mean(values)))
    assert spread.worst == min(values)


# --- selection ----------------------------------------------------------------------------------------------------


def evaluation(client_id: str, loss: float) -> Evaluated:
    return Evaluated(
        task_id="task",
        run_id="run",
        round=1,
        client_id=client_id,
        loss=loss,
        accuracy=0.0,
        sample_count=10,
        label_count=10,
        measured_peak_bytes=0,
        seconds=1.0,
    )


def test_power_of_choice_selects_the_largest_evaluated_losses() -> None:
    method = PowerOfChoice(candidates=4.0, losses="evaluated")
    select = method.roles().selector.select
    assert select is not None
    losses = {"ada": 1.0, "bob": 3.0, "cyd": 2.0, "dan": None}
    clients = tuple(
        AvailableClient(
            client_id=name,
            sample_count=10,
            budget=Budget(memory_bytes=1),
            evaluation=None if loss is None else evaluation(name, loss),
        )
        for name, loss in losses.items()
    )
    for count, expected in ((1, {"dan"}), (2, {"dan", "bob"}), (3, {"dan", "bob", "cyd"})):
        chosen = select(SelectionContext(clients=clients, count=count, round=2, memory=ChoiceMemory()))
        assert set(chosen.clients) == expected


def test_a_method_that_chooses_by_evaluations_needs_them_after_every_round() -> None:
    with pytest.raises(ValueError, match=r"evaluation.every is 0, but method 'power_of_choice' chooses by what"):
        config(method=PowerOfChoice(losses="evaluated"))
    assert config(method=PowerOfChoice(losses="evaluated"), evaluation=EACH).evaluation == EACH


@pytest.mark.slow
def test_methods_get_the_evaluations_of_clients(tmp_path: Path) -> None:
    """Of three clients, the two with the largest losses are chosen, once all losses are known."""
    losses = {"ada": 3.0, "bob": 1.0, "cyd": 2.0}
    behaviours = {
        name: replace(behaviour, held_out_count=HELD_OUT, evaluate=lambda weights, task: (losses[task.client_id], 0.5))
        for name, behaviour in fleet().items()
    }
    method = PowerOfChoice(candidates=3.0, losses="evaluated")
    settings = config(rounds=6, clients_per_round=2, method=method, evaluation=EACH)
    world = World(tmp_path, settings, behaviours)
    world.run()
    chosen = [{row.client_id for row in record.aggregated} for record in world.server.result().rounds]
    assert chosen[2:] == [{"ada", "cyd"}] * 4
    assert set().union(*chosen[:2]) == {*CLIENTS}, "clients without a known loss come first"
