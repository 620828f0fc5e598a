"""A round is evaluated by what devices have trained, whatever a method is set to; and results say what that is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from subfleet.aggregation import round_aggregator
from subfleet.aggregation.round_aggregator import Examiner
from subfleet.aggregation.views import Views
from subfleet.elastic.evaluate import evaluate
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.aggregator import EvaluatedModel
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.nefl import NeFL
from subfleet.methods.standalone import Standalone
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import RunState
from subfleet.testing.outside_evaluation import draw_samples, evaluate_outside, examine
from subfleet.testing.rounds import MODEL, DrawnClient, draw_state, make_context, play, store_update
from subfleet.testing.submodels import find_held_elements
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


def _small(context: RunContext, count: int = 3) -> list[DrawnClient]:
    """Clients of all sizes but the largest, where there are several."""
    most = max(1, len(context.space) - 1)
    return [DrawnClient(name=f"client{place}", size=place % most, samples=place + 1) for place in range(count)]


def _told(context: RunContext, clients: list[DrawnClient], folder: Path) -> EvaluatedModel:
    aggregated = play(context, draw_state(context.network), clients, folder)
    return examine(context, aggregated, draw_samples(context.network)).model


def test_every_method_with_a_size_as_its_parameter_is_tried() -> None:
    assert set(OF_ONE_SIZE) == {name for name, kind in METHODS.items() if "model" in kind.__dataclass_fields__}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_devices_have_trained_and_what_the_checkpoint_holds(case: str, tmp_path: Path) -> None:
    method, changes = CASES[case]
    context = make_context(method, **changes)
    first, samples, clients = draw_state(context.network), draw_samples(context.network), _small(context)
    aggregated = play(context, first, clients, tmp_path)
    told, found = examine(context, aggregated, samples), evaluate_outside(context, first, aggregated, samples)
    assert not found.untrained, f"{found.untrained:.1%} of {told.model.description} was trained by nobody"
    assert told.model.untrained == 0.0
    if context.roles.techniques.norms != "recalibrated":
        assert told.evaluation.accuracy == pytest.approx(found.accuracy, abs=1e-9)


def test_the_size_that_is_trained_has_its_name_and_the_whole_model_has_none(tmp_path: Path) -> None:
    context = make_context(FedAvg(model="smallest"))
    model = _told(context, _small(context), tmp_path)
    size = context.space[0]
    assert (model.kind, model.submodel, model.architecture_id, model.count) == (
        "trained",
        size.name,
        size.architecture_id,
        1,
    )
    assert model.description == f"submodel {size.name}, the largest that devices have trained"
    assert model.short == size.name
    whole = _told(make_context(FedAvg()), [DrawnClient(name="a", size=0)], tmp_path)
    assert (whole.submodel, whole.description, whole.short) == ("", "the full model", "full")


def test_the_largest_that_was_ever_trained_stays_the_model(tmp_path: Path) -> None:
    context = make_context(HeteroFL())
    last = len(context.space) - 1
    aggregated = play(context, draw_state(context.network), [DrawnClient(name="a", size=last - 1)], tmp_path)
    assert aggregated.state.model == context.space[last - 1]
    aggregated = play(context, aggregated.state, [DrawnClient(name="a", size=0)], tmp_path, 2)
    assert aggregated.state.model == context.space[last - 1]
    aggregated = play(context, aggregated.state, [DrawnClient(name="b", size=last)], tmp_path, 3)
    assert aggregated.state.model == context.network.full_architecture()
    assert not aggregated.state.untrained


def test_submodels_that_together_are_the_whole_network_make_it_the_model(tmp_path: Path) -> None:
    context = make_context(HeteroFL())
    lacking = find_held_elements(context.network, context.space[0])
    state = replace(draw_state(context.network), untrained=lacking, model=context.space[1])
    assert play(context, state, [], tmp_path).state.model == context.space[1]
    aggregated = play(context, state, [DrawnClient(name="a", size=0)], tmp_path).state
    assert not aggregated.untrained
    assert aggregated.model == context.network.full_architecture()


def test_a_model_whose_parts_clients_train_in_turn_tells_what_nobody_has_trained_yet(tmp_path: Path) -> None:
    context = make_context(FedRolex())
    model = _told(context, [DrawnClient(name="a", size=0)], tmp_path)
    assert model.kind == "whole"
    assert 0.5 < model.untrained < 1
    assert model.description == f"the full model, {model.untrained:.1%} untrained"


def test_what_is_nearly_all_trained_is_not_told_to_be_so() -> None:
    assert EvaluatedModel(kind="whole", untrained=1e-6).description == "the full model, 0.1% untrained"


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
    context = make_context(METHODS[name]())
    model = _told(context, _small(context, 2), tmp_path)
    assert model.description == f"the mean of 2 devices, {told}"
    assert model.short == f"each {model.kind}"


def test_a_mean_over_clients_is_over_all_that_have_taken_part(tmp_path: Path) -> None:
    context = make_context(Standalone())
    samples, (ada, bob) = draw_samples(context.network), _small(context, 2)
    before = play(context, draw_state(context.network), [ada, bob], tmp_path)
    alone = [examine(context, replace(before, clients=(one,)), samples).evaluation.accuracy for one in before.clients]
    after = play(context, before.state, [ada], tmp_path, 2)
    (moved,) = after.clients
    mine = examine(context, replace(after, clients=(moved,)), samples).evaluation.accuracy
    clients = {one.name: store_update(context, one, BlobStore(tmp_path)) for one in (ada, bob)}
    views = Views(context=context, samples=torch.from_numpy(samples.inputs))
    found = Examiner(views, samples).examine(after, RunState(last=MappingProxyType(clients)), 2)
    assert found.model.count == 2
    assert found.evaluation.accuracy == pytest.approx((mine + alone[1]) / 2)


def test_models_that_nobody_has_moved_are_not_evaluated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(METHODS["clustered"]())
    samples, counted = draw_samples(context.network), list[str]()
    clients = [DrawnClient(name=name, size=size) for name, size in (("a", 0), ("b", 0), ("c", 1))]
    before = play(context, draw_state(context.network), clients, tmp_path)
    after = play(context, before.state, clients[2:], tmp_path, 2)
    last = {one.name: store_update(context, one, BlobStore(tmp_path)) for one in clients}
    real = evaluate

    def counting(network: Any, architecture: Any, *more: Any, **named: Any) -> Any:
        counted.append(architecture.name)
        return real(network, architecture, *more, **named)

    monkeypatch.setattr(round_aggregator, "evaluate", counting)
    examiner = Examiner(Views(context=context, samples=torch.from_numpy(samples.inputs)), samples)
    first = examiner.examine(before, RunState(), 1)
    assert sorted(counted) == sorted(one.name for one in context.space[:2]), "two architectures of three clients"
    counted.clear()
    again = examiner.examine(after, RunState(last=MappingProxyType(last)), 2)
    assert counted == [context.space[1].name]
    assert again.model.count == first.model.count == 3
