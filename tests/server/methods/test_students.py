"""The submodels that the whole model teaches after a round."""

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


def list_students(
    method: AnyMethod, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int = 1
) -> list[Architecture]:
    """Return the submodels taught at the end of a round of twelve clients."""
    taught: list[Architecture] = []

    def record(network: object, state: object, architectures: Sequence[Architecture], *more: object) -> object:
        taught.extend(architectures)
        return state

    monkeypatch.setattr(network_aggregation, "distil", record)
    context = make_context(method, distillation=LESSONS)
    clients = [DrawnClient(name=f"client{index}", size=0) for index in range(12)]
    play(context, draw_state(context.network), clients, folder, number)
    return taught


@pytest.mark.slow
def test_students_of_dynamic_selection_are_of_the_space_that_it_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(DynamicSelection(estimates="estimated", rates=RATES))
    space = search_space(context.network, RATES)
    taught = list_students(DynamicSelection(estimates="estimated", rates=RATES), tmp_path, monkeypatch)
    assert len(taught) == 12
    assert taught[0] == space.architecture(space.smallest)
    assert all(space.holds(architecture) for architecture in taught)
    assert space.count() > 10 * len(context.space)
    uniform = {architecture.architecture_id for architecture in context.space}
    # Uniform submodels are such a small fraction of the space that hardly one of 11 draws is uniform.
    assert sum(architecture.architecture_id in uniform for architecture in taught[1:]) < 3
    assert taught != list_students(DynamicSelection(estimates="estimated", rates=RATES), tmp_path, monkeypatch, 2)


@pytest.mark.slow
def test_students_of_other_methods_are_their_sizes_as_they_place_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, kind in ((HeteroFL(), None), (FedRolex(), Roll), (FederatedDropout(), Explicit)):
        context = make_context(method)
        taught = list_students(method, tmp_path, monkeypatch, 2)
        sizes = [context.network.size_of(architecture).architecture_id for architecture in taught]
        assert sizes[0] == min(context.space, key=context.network.parameter_count).architecture_id
        assert set(sizes) <= {architecture.architecture_id for architecture in context.space}
        if kind is not None:
            assert all(isinstance(indices, kind) for architecture in taught for _, indices in architecture.axes)
