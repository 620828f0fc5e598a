"""A round evaluates what devices have trained, whatever the method's settings, and results name that model."""

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
"""Methods that train one model for all clients, with its size as a parameter."""
_KINDS: Mapping[str, Any] = METHODS
CASES: Mapping[str, tuple[AnyMethod, Mapping[str, Any]]] = MappingProxyType(
    {
        **{f"{name} {size}": (_KINDS[name](model=size), {}) for name in OF_ONE_SIZE for size in ("smallest", "nested")},
        "a bank of norms": (HeteroFL(), {"norms": "bank"}),
        "norms measured anew": (HeteroFL(), {"norms": "recalibrated", "model": replace(MODEL, norm="batch")}),
        "NeFL with steps": (NeFL(), {"model": replace(MODEL, learnable_steps=True)}),
    }
)


def _make_small_clients(context: RunContext, count: int = 3) -> list[DrawnClient]:
    """Return clients of all sizes except the largest, where there are several."""
    most = max(1, len(context.space) - 1)
    return [DrawnClient(name=f"client{index}", size=index % most, samples=index + 1) for index in range(count)]


def _evaluate_round(context: RunContext, clients: list[DrawnClient], folder: Path) -> EvaluatedModel:
    aggregated = play(context, draw_state(context.network), clients, folder)
    return examine(context, aggregated, draw_samples(context.network)).model


def test_every_method_with_a_size_as_its_parameter_is_tried() -> None:
    assert set(OF_ONE_SIZE) == {name for name, kind in METHODS.items() if "model" in kind.__dataclass_fields__}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_round_evaluates_the_trained_model_that_the_checkpoint_holds(case: str, tmp_path: Path) -> None:
    method, changes = CASES[case]
    context = make_context(method, **changes)
    first, samples, clients = draw_state(context.network), draw_samples(context.network), _make_small_clients(context)
    aggregated = play(context, first, clients, tmp_path)
    examined, outside = examine(context, aggregated, samples), evaluate_outside(context, first, aggregated, samples)
    assert not outside.untrained, f"{outside.untrained:.1%} of {examined.model.description} was trained by nobody"
    assert examined.model.untrained == 0.0
    if context.roles.techniques.norms != "recalibrated":
        assert examined.evaluation.accuracy == pytest.approx(outside.accuracy, abs=1e-9)


def test_the_size_that_is_trained_has_its_name_and_the_whole_model_has_none(tmp_path: Path) -> None:
    context = make_context(FedAvg(model="smallest"))
    model = _evaluate_round(context, _make_small_clients(context), tmp_path)
    size = context.space[0]
    assert (model.kind, model.submodel, model.architecture_id, model.count) == (
        "trained",
        size.name,
        size.architecture_id,
        1,
    )
    assert model.description == f"submodel {size.name}, the largest that devices have trained"
    assert model.short == size.name
    whole = _evaluate_round(make_context(FedAvg()), [DrawnClient(name="a", size=0)], tmp_path)
    assert (whole.submodel, whole.description, whole.short) == ("", "the full model", "full")


@pytest.mark.slow
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


def test_a_model_trained_in_parts_reports_its_untrained_fraction(tmp_path: Path) -> None:
    context = make_context(FedRolex())
    model = _evaluate_round(context, [DrawnClient(name="a", size=0)], tmp_path)
    assert model.kind == "whole"
    assert 0.5 < model.untrained < 1
    assert model.description == f"the full model, {model.untrained:.1%} untrained"


def test_what_is_nearly_all_trained_is_not_reported_as_trained() -> None:
    assert EvaluatedModel(kind="whole", untrained=1e-6).description == "the full model, 0.1% untrained"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("standalone", "each with its own model"),
        ("flexifed", "each with its own model"),
        ("fedadp", "each with its own model"),
        ("clustered", "each with its architecture's model"),
        ("sattler", "each with its cluster's model"),
        ("fedtrans", "each with its own network"),
    ],
)
def test_models_of_clients_are_reported_as_a_mean(name: str, words: str, tmp_path: Path) -> None:
    context = make_context(METHODS[name]())
    model = _evaluate_round(context, _make_small_clients(context, 2), tmp_path)
    assert model.description == f"the mean of 2 devices, {words}"
    assert model.short == f"each {model.kind}"


def test_a_mean_over_clients_is_over_all_that_have_taken_part(tmp_path: Path) -> None:
    context = make_context(Standalone())
    samples, (ada, bob) = draw_samples(context.network), _make_small_clients(context, 2)
    before = play(context, draw_state(context.network), [ada, bob], tmp_path)
    alone = [
        examine(context, replace(before, clients=(client,)), samples).evaluation.accuracy for client in before.clients
    ]
    after = play(context, before.state, [ada], tmp_path, 2)
    (moved,) = after.clients
    moved_accuracy = examine(context, replace(after, clients=(moved,)), samples).evaluation.accuracy
    clients = {client.name: store_update(context, client, BlobStore(tmp_path)) for client in (ada, bob)}
    views = Views(context=context, samples=torch.from_numpy(samples.inputs))
    examined = Examiner(views, samples).examine(after, RunState(last=MappingProxyType(clients)), 2)
    assert examined.model.count == 2
    assert examined.evaluation.accuracy == pytest.approx((moved_accuracy + alone[1]) / 2)


def test_models_that_nobody_has_moved_are_not_evaluated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(METHODS["clustered"]())
    samples, evaluated = draw_samples(context.network), list[str]()
    clients = [DrawnClient(name=name, size=size) for name, size in (("a", 0), ("b", 0), ("c", 1))]
    before = play(context, draw_state(context.network), clients, tmp_path)
    after = play(context, before.state, clients[2:], tmp_path, 2)
    last = {drawn.name: store_update(context, drawn, BlobStore(tmp_path)) for drawn in clients}
    real = evaluate

    def count_evaluation(network: Any, architecture: Any, *more: Any, **named: Any) -> Any:
        evaluated.append(architecture.name)
        return real(network, architecture, *more, **named)

    monkeypatch.setattr(round_aggregator, "evaluate", count_evaluation)
    examiner = Examiner(Views(context=context, samples=torch.from_numpy(samples.inputs)), samples)
    first = examiner.examine(before, RunState(), 1)
    assert sorted(evaluated) == sorted(size.name for size in context.space[:2]), "two architectures of three clients"
    evaluated.clear()
    again = examiner.examine(after, RunState(last=MappingProxyType(last)), 2)
    assert evaluated == [context.space[1].name]
    assert again.model.count == first.model.count == 3
