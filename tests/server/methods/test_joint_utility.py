"""FedTrans: the utility of each network for a client, estimated from losses."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from server.methods.test_fedtrans import LOSSES, METHOD, close_round, past, relaxed

from subfleet.methods.fedtrans import FedTransMemory, Growth
from subfleet.methods.growth import clip_losses, convergence, inherit_utilities, odds, similarity, update_utilities
from subfleet.protocol.limits import MAX_LOSS


@pytest.mark.slow
@relaxed
@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=9))
def test_chances_are_a_softmax(values: list[float]) -> None:
    """T6."""
    chances = odds(values)
    assert math.fsum(chances) == pytest.approx(1)
    assert all(chance > 0 for chance in chances)
    torch.testing.assert_close(torch.tensor(chances), torch.softmax(torch.tensor(values), 0))


@given(
    losses=st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1),
    parts=st.lists(st.integers(1, 10**6), min_size=2, max_size=4, unique=True),
    data=st.data(),
)
def test_a_utility_falls_exactly_where_the_loss_is_above_the_mean(
    losses: dict[str, float], parts: list[int], data: st.DataObject
) -> None:
    """T6 and equation 4: the utilities of similar networks fall with it, in proportion to their similarity."""
    parameters = {f"m{index}": count for index, count in enumerate(sorted(parts))}
    assigned = {name: data.draw(st.sampled_from(sorted(parameters))) for name in losses}
    clients = {name: past(assigned[name], loss) for name, loss in losses.items()}
    after = update_utilities({}, clients, parameters)
    losses = clip_losses(losses)
    values = torch.tensor(list(losses.values()), dtype=torch.float64)
    spread = float(values.std(correction=0))
    if spread < 1e-8:
        assert after == {}
        return
    for name, loss in losses.items():
        own = after[name][assigned[name]]
        assert own == pytest.approx(-(loss - float(values.mean())) / spread, abs=1e-6)
        for network, count in parameters.items():
            alike = similarity(*sorted((count, parameters[assigned[name]])))
            assert 0 < alike <= 1
            assert after[name][network] == pytest.approx(own * alike)


def test_utilities_stay_within_bounds() -> None:
    utilities: Mapping[str, Mapping[str, float]] = {}
    for _ in range(40):
        utilities = update_utilities(utilities, {"ada": past("", 0.0), "bob": past("", 5.0)}, {"": 3})
    assert utilities == {"ada": {"": 10.0}, "bob": {"": -10.0}}


@given(losses=st.lists(st.floats(1.0, 10.0), min_size=2, max_size=9), claim=st.floats(-MAX_LOSS / 2, MAX_LOSS / 2))
def test_whatever_one_client_claims_of_its_loss_moves_little(losses: list[float], claim: float) -> None:
    """Honest losses are unchanged; with a false claim, no loss is below 0 or above ten times the median."""
    honest = {str(index): loss for index, loss in enumerate(losses)}
    assert clip_losses(honest) == honest
    clipped = clip_losses({**honest, "eve": claim})
    assert clipped.keys() == {*honest, "eve"}
    assert all(0 <= clipped[name] <= 10 * max(losses) for name in clipped)
    assert all(clipped[name] <= loss for name, loss in honest.items())
    memory, remember = FedTransMemory(), METHOD.roles().memory.remember
    assert remember is not None
    after: FedTransMemory = remember(
        memory, close_round(Growth(parameters={"": 3}, newest=""), {**honest, "eve": claim})
    )
    assert after.losses[-1] <= 10 * max(losses)
    assert all(abs(own[""]) <= 10 for own in after.utilities.values())


def test_a_client_that_claims_a_huge_loss_once_does_not_end_growth() -> None:
    """The moving loss forgets it within the rounds considered."""
    method = replace(METHOD, gamma=10, delta=5, beta=0.003, smoothing=0.2)
    remember = method.roles().memory.remember
    assert remember is not None
    memory = FedTransMemory()
    for number in range(40):
        losses = {"ada": 1.0, "bob": 1.0, "cyd": 1.0, "eve": 1e38 if number == 8 else 1.0}
        memory = remember(memory, close_round(Growth(parameters={"": 3}, newest=""), losses))
    assert convergence(memory.losses, gamma=10, delta=5) <= 0.003


def test_a_network_that_appears_has_what_its_parent_had() -> None:
    assert inherit_utilities({"ada": {"m0": 2.0}, "bob": {}}, "m1", "m0") == {"ada": {"m0": 2.0, "m1": 2.0}, "bob": {}}
    remember = METHOD.roles().memory.remember
    assert remember is not None
    memory = FedTransMemory(utilities={"zoe": {"": 4.0}}, losses=(1.0,))
    grown = Growth(parameters={"": 3}, newest="", born="m1", wide=("section0.block0",))
    after: FedTransMemory = remember(memory, close_round(grown, LOSSES))
    assert after.utilities["zoe"] == {"": 4.0, "m1": 4.0}
    assert after.utilities["ada"] == {"": pytest.approx(1.0), "m1": pytest.approx(1.0)}
    assert (after.losses, after.wide) == ((), ("section0.block0",)), "the newest is another one now"
    assert remember(memory, replace(close_round(grown, LOSSES), observation=None)) == memory
