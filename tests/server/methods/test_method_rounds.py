"""Properties of a round with every method."""

from dataclasses import replace
from pathlib import Path

import pytest
from server.methods.method_cases import QUICK

from subfleet.elastic.grafting import graft
from subfleet.elastic.network import Network
from subfleet.methods import METHODS
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.fedfa import FedFA
from subfleet.protocol.submodel import Architecture
from subfleet.testing import MethodContract
from subfleet.testing.rounds import (
    DrawnClient,
    draw_state,
    make_context,
    play,
)
from subfleet.testing.submodels import have_same_bits

SHARED = {"heterofl", "fedavg", "fedprox", "fjord", "fedrolex", "federated_dropout"}
"""Methods that keep one shared model and change it by their clients' updates alone."""


class TestEveryMethod(MethodContract):
    """The contract that methods in other packages are tested with, too."""

    @pytest.fixture(params=QUICK, autouse=True)
    def _set_method(self, request: pytest.FixtureRequest) -> None:
        self.method = QUICK[request.param]

    @pytest.mark.slow
    def test_the_order_of_clients_does_not_matter_and_the_state_survives_a_crash(self, tmp_path: Path) -> None:
        super().test_the_order_of_clients_does_not_matter_and_the_state_survives_a_crash(tmp_path)

    @pytest.mark.slow
    def test_its_accuracy_is_that_of_the_trained_model(self, tmp_path: Path) -> None:
        super().test_its_accuracy_is_that_of_the_trained_model(tmp_path)

    def moved_architecture(self, network: Network, architecture: Architecture) -> Architecture:
        return (
            graft(network, architecture).architecture
            if isinstance(self.method, FedFA)
            else super().moved_architecture(network, architecture)
        )


@pytest.mark.parametrize("name", sorted(SHARED - {"fedavg", "fedprox"}))
def test_clients_of_the_whole_model_equal_fedavg(name: str, tmp_path: Path) -> None:
    kind = METHODS[name]
    method = kind(weighting="samples") if name in ("heterofl", "fedrolex") else kind()  # type: ignore[call-arg]
    context, reference = make_context(method), make_context(FedAvg())
    clients = [
        DrawnClient(name=name, size=len(context.space) - 1, samples=count) for name, count in (("a", 3), ("b", 8))
    ]
    whole = [replace(client, size=0) for client in clients]
    state = draw_state(context.network)
    aggregated = play(context, state, clients, tmp_path).state.shared
    assert have_same_bits(aggregated, play(reference, state, whole, tmp_path).state.shared)
