"""A round is evaluated by what devices have trained, whatever a method is set to; and results say what that is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from subfleet.elastic.evaluate import evaluate
from subfleet.folding import examining
from subfleet.folding.examining import Examiner
from subfleet.folding.views import Views
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.model_kinds import EvaluatedModel
from subfleet.methods.nefl import NeFL
from subfleet.methods.standalone import Standalone
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms
from subfleet.testing.evaluated import drawn_samples, examined, from_outside
from subfleet.testing.rounds import MODEL, Client, first_state, play, seat_of, terms_with
from subfleet.testing.subnets import held_places
from subfleet.transport.blob_store import BlobStore

OF_ONE_SIZE = ("fedavg", "fedprox", "fedadam", "fedyogi", "oort", "power_of_choice", "sattler")
"""Methods that train one model for all, of a size that is a parameter."""
_KINDS: Mapping[str, Any] = METHODS
CASES: Mapping[str, tuple[AnyMethod, Mapping[str, Any]]] = MappingProxyType(
    {
        **{f"{name} {size}": (_KINDS[name](model=size), {}) for name in OF_ONE_SIZE for size in ("smallest", "nested")},
        "a bank of norms": (HeteroFL(), {"norms": "bank"}),
        "norms measured anew": (HeteroFL(), {"norms": "recalibrated", "model": replace(MODEL, norm="batch")}),
        "NeFL with steps": (NeFL(), {"model": replace(MODEL, learnable_steps=True)}),
    }
)


def _small(terms: Terms, count: int = 3) -> list[Client]:
    """Clients of all sizes but the largest, where there are several."""
    most = max(1, len(terms.space) - 1)
    return [Client(name=f"client{place}", size=place % most, samples=place + 1) for place in range(count)]


def _told(terms: Terms, clients: list[Client], folder: Path) -> EvaluatedModel:
    folded = play(terms, first_state(terms.network), clients, folder)
    return examined(terms, folded, drawn_samples(terms.network)).model


def test_every_method_with_a_size_as_its_parameter_is_tried() -> None:
    assert set(OF_ONE_SIZE) == {name for name, kind in METHODS.items() if "model" in kind.__dataclass_fields__}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_devices_have_trained_and_what_the_checkpoint_holds(case: str, tmp_path: Path) -> None:
    method, changes = CASES[case]
    terms = terms_with(method, **changes)
    first, samples, clients = first_state(terms.network), drawn_samples(terms.network), _small(terms)
    folded = play(terms, first, clients, tmp_path)
    told, found = examined(terms, folded, samples), from_outside(terms, first, folded, samples)
    assert not found.untrained, f"{found.untrained:.1%} of {told.model.told} was trained by nobody"
    assert told.model.untrained == 0.0
    if not terms.roles.techniques.recalibrates:
        assert told.evaluation.accuracy == pytest.approx(found.accuracy, abs=1e-9)


def test_the_size_that_is_trained_has_its_name_and_the_whole_model_has_none(tmp_path: Path) -> None:
    terms = terms_with(FedAvg(model="smallest"))
    model = _told(terms, _small(terms), tmp_path)
    size = terms.space[0]
    assert (model.kind, model.subnet, model.spec_id, model.count) == ("trained", size.name, size.spec_id, 1)
    assert model.told == f"subnet {size.name}, the largest that devices have trained"
    assert model.short == size.name
    whole = _told(terms_with(FedAvg()), [Client(name="a", size=0)], tmp_path)
    assert (whole.subnet, whole.told, whole.short) == ("", "the full model", "full")


def test_the_largest_that_was_ever_trained_stays_the_model(tmp_path: Path) -> None:
    terms = terms_with(HeteroFL())
    last = len(terms.space) - 1
    folded = play(terms, first_state(terms.network), [Client(name="a", size=last - 1)], tmp_path)
    assert folded.state.model == terms.space[last - 1]
    folded = play(terms, folded.state, [Client(name="a", size=0)], tmp_path, 2)
    assert folded.state.model == terms.space[last - 1]
    folded = play(terms, folded.state, [Client(name="b", size=last)], tmp_path, 3)
    assert folded.state.model == terms.network.full_spec()
    assert not folded.state.untrained


def test_subnets_that_together_are_the_whole_network_make_it_the_model(tmp_path: Path) -> None:
    terms = terms_with(HeteroFL())
    lacking = held_places(terms.network, terms.space[0])
    state = replace(first_state(terms.network), untrained=lacking, model=terms.space[1])
    assert play(terms, state, [], tmp_path).state.model == terms.space[1]
    folded = play(terms, state, [Client(name="a", size=0)], tmp_path).state
    assert not folded.untrained
    assert folded.model == terms.network.full_spec()


def test_a_model_whose_parts_clients_train_in_turn_tells_what_nobody_has_trained_yet(tmp_path: Path) -> None:
    terms = terms_with(FedRolex())
    model = _told(terms, [Client(name="a", size=0)], tmp_path)
    assert model.kind == "whole"
    assert 0.5 < model.untrained < 1
    assert model.told == f"the full model, {model.untrained:.1%} untrained"


def test_what_is_nearly_all_trained_is_not_told_to_be_so() -> None:
    assert EvaluatedModel(kind="whole", untrained=1e-6).told == "the full model, 0.1% untrained"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("standalone", "each with its own model"),
        ("flexifed", "each with its own model"),
        ("fedadp", "each with its own model"),
        ("clustered", "each with its architecture's model"),
        ("sattler", "each with its cluster's model"),
        ("fedtrans", "each with the network that it has"),
    ],
)
def test_models_that_clients_have_are_told_as_a_mean(name: str, told: str, tmp_path: Path) -> None:
    terms = terms_with(METHODS[name]())
    model = _told(terms, _small(terms, 2), tmp_path)
    assert model.told == f"the mean of 2 devices, {told}"
    assert model.short == f"each {model.kind}"


def test_a_mean_over_clients_is_over_all_that_have_taken_part(tmp_path: Path) -> None:
    terms = terms_with(Standalone())
    samples, (ada, bob) = drawn_samples(terms.network), _small(terms, 2)
    before = play(terms, first_state(terms.network), [ada, bob], tmp_path)
    alone = [examined(terms, replace(before, clients=(one,)), samples).evaluation.accuracy for one in before.clients]
    after = play(terms, before.state, [ada], tmp_path, 2)
    (moved,) = after.clients
    mine = examined(terms, replace(after, clients=(moved,)), samples).evaluation.accuracy
    seats = {one.name: seat_of(terms, one, BlobStore(tmp_path)) for one in (ada, bob)}
    views = Views(terms=terms, samples=torch.from_numpy(samples.inputs))
    found = Examiner(views, samples).examined(after, RunState(last=MappingProxyType(seats)), 2)
    assert found.model.count == 2
    assert found.evaluation.accuracy == pytest.approx((mine + alone[1]) / 2)


def test_models_that_nobody_has_moved_are_not_evaluated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = terms_with(METHODS["clustered"]())
    samples, counted = drawn_samples(terms.network), list[str]()
    clients = [Client(name=name, size=size) for name, size in (("a", 0), ("b", 0), ("c", 1))]
    before = play(terms, first_state(terms.network), clients, tmp_path)
    after = play(terms, before.state, clients[2:], tmp_path, 2)
    seats = {one.name: seat_of(terms, one, BlobStore(tmp_path)) for one in clients}
    real = evaluate

    def counting(network: Any, spec: Any, *more: Any, **named: Any) -> Any:
        counted.append(spec.name)
        return real(network, spec, *more, **named)

    monkeypatch.setattr(examining, "evaluate", counting)
    examiner = Examiner(Views(terms=terms, samples=torch.from_numpy(samples.inputs)), samples)
    first = examiner.examined(before, RunState(), 1)
    assert sorted(counted) == sorted(one.name for one in terms.space[:2]), "two architectures of three clients"
    counted.clear()
    again = examiner.examined(after, RunState(last=MappingProxyType(seats)), 2)
    assert counted == [terms.space[1].name]
    assert again.model.count == first.model.count == 3
