"""Whom the whole model teaches after a round."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from subfleet.aggregation import network_aggregation
from subfleet.elastic.spaces import search_space
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods import AnyMethod
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.federated_dropout import FederatedDropout
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.submodel import Architecture, Explicit, Roll
from subfleet.testing.rounds import RATES, DrawnClient, draw_state, make_context, play

LESSONS = DistillationSettings(iterations=1, batch_size=2)


def students(method: AnyMethod, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int = 1) -> list[Architecture]:
    """Whom a round of twelve clients ends with."""
    found: list[Architecture] = []

    def nothing(network: object, state: object, architectures: Sequence[Architecture], *more: object) -> object:
        found.extend(architectures)
        return state

    monkeypatch.setattr(network_aggregation, "distil", nothing)
    context = make_context(method, distillation=LESSONS)
    clients = [DrawnClient(name=f"client{place}", size=0) for place in range(12)]
    play(context, draw_state(context.network), clients, folder, number)
    return found


def test_students_of_dynamic_selection_are_of_the_space_that_it_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(DynamicSelection(estimates="estimated", rates=RATES))
    space = search_space(context.network, RATES)
    found = students(DynamicSelection(estimates="estimated", rates=RATES), tmp_path, monkeypatch)
    assert len(found) == 12
    assert found[0] == space.architecture(space.smallest)
    assert all(space.holds(one) for one in found)
    assert space.count() > 10 * len(context.space)
    uniform = {one.architecture_id for one in context.space}
    # The fraction of the space that is uniform is so small that of 11 draws hardly one is.
    assert sum(one.architecture_id in uniform for one in found[1:]) < 3
    assert found != students(DynamicSelection(estimates="estimated", rates=RATES), tmp_path, monkeypatch, 2)


@pytest.mark.slow
def test_students_of_other_methods_are_sizes_of_their_own_where_they_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, kind in ((HeteroFL(), None), (FedRolex(), Roll), (FederatedDropout(), Explicit)):
        context = make_context(method)
        found = students(method, tmp_path, monkeypatch, 2)
        sizes = [context.network.size_of(one).architecture_id for one in found]
        assert sizes[0] == min(context.space, key=context.network.parameter_count).architecture_id
        assert set(sizes) <= {one.architecture_id for one in context.space}
        if kind is not None:
            assert all(isinstance(kept, kind) for one in found for _, kept in one.axes)
