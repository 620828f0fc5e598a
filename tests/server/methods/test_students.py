"""Whom the whole model teaches after a round."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from subfleet.elastic.spaces import search_space
from subfleet.elastic.teaching import DistillationSettings
from subfleet.folding import network_folding
from subfleet.methods import AnyMethod
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.federated_dropout import FederatedDropout
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.subnet import Explicit, Roll, SubnetSpec
from subfleet.testing.rounds import RATES, Client, first_state, play, terms_with

LESSONS = DistillationSettings(iterations=1, batch_size=2)


def students(method: AnyMethod, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int = 1) -> list[SubnetSpec]:
    """Whom a round of twelve clients ends with."""
    found: list[SubnetSpec] = []

    def nothing(network: object, state: object, specs: Sequence[SubnetSpec], *more: object) -> object:
        found.extend(specs)
        return state

    monkeypatch.setattr(network_folding, "distil", nothing)
    terms = terms_with(method, distillation=LESSONS)
    clients = [Client(name=f"client{place}", size=0) for place in range(12)]
    play(terms, first_state(terms.network), clients, folder, number)
    return found


def test_students_of_dynamic_selection_are_of_the_space_that_it_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = terms_with(DynamicSelection(prices="estimated", rates=RATES))
    space = search_space(terms.network, RATES)
    found = students(DynamicSelection(prices="estimated", rates=RATES), tmp_path, monkeypatch)
    assert len(found) == 12
    assert found[0] == space.spec(space.smallest)
    assert all(space.holds(one) for one in found)
    assert space.count() > 10 * len(terms.space)
    uniform = {one.spec_id for one in terms.space}
    # The share of the space that is uniform is so small that of 11 draws hardly one is.
    assert sum(one.spec_id in uniform for one in found[1:]) < 3
    assert found != students(DynamicSelection(prices="estimated", rates=RATES), tmp_path, monkeypatch, 2)


@pytest.mark.slow
def test_students_of_other_methods_are_sizes_of_their_own_where_they_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, kind in ((HeteroFL(), None), (FedRolex(), Roll), (FederatedDropout(), Explicit)):
        terms = terms_with(method)
        found = students(method, tmp_path, monkeypatch, 2)
        sizes = [terms.network.size_of(one).spec_id for one in found]
        assert sizes[0] == min(terms.space, key=terms.network.parameter_count).spec_id
        assert set(sizes) <= {one.spec_id for one in terms.space}
        if kind is not None:
            assert all(isinstance(kept, kind) for one in found for _, kept in one.axes)
