"""The server scores paths of a supernet with running statistics of their own, by the metric that the run uses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from subfleet.aggregation.path_scoring import score_generation, score_path
from subfleet.aggregation.views import Views
from subfleet.elastic.building import init_state
from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.families.records.choices import ChoiceRnn
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import recalibrate
from subfleet.elastic.supernets import path_architecture
from subfleet.methods.aggregator import Participant
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.tier_search import TierSearch
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.training import ObjectiveSettings, TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.rounds.progress import Searching
from subfleet.rounds.state import RunState
from subfleet.search.supernets import EvolutionSettings
from subfleet.settings.samples import DataSettings
from subfleet.tasks import Dataset
from subfleet.testing.rounds import SUPERNET, make_context

EVOLUTION = EvolutionSettings(evaluations=4, population=4, offspring=2)
METHOD = FedorAS(supernet_rounds=1, tiers=1, search=TierSearch(evolution=EVOLUTION))
BATCH = replace(SUPERNET, norm="batch", widths=(8,), last_widths=(8,))
TEXT = ChoiceRnn(
    input_shape=(6,), vocabulary=5, class_count=5, widths=(8,), depths=(1,), operators=(("gru", "linear"),)
)


def context_of(model: object, **changes: object) -> RunContext:
    data = DataSettings(test="unused", validation_samples=40)
    return make_context(METHOD, model, data=data, **changes)  # type: ignore[arg-type]


def spoil_statistics(network: Network) -> dict[str, Tensor]:
    """Random weights, and running statistics that belong to no data."""
    roles = {name: decl.role for name, decl in network.tensors.items()}
    state = init_state(network, 1)
    return {
        name: torch.arange(1.0, 1.0 + len(tensor)) * 7 if roles[name] in ("mean", "variance") else tensor
        for name, tensor in state.items()
    }


def samples(shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(2)
    inputs = torch.randn((40, *shape), generator=stream)
    return inputs, torch.randint(classes, (40,), generator=stream)


@pytest.mark.slow
def test_a_path_is_scored_by_running_statistics_of_its_own() -> None:
    context = context_of(BATCH)
    network, data = context.network, samples(BATCH.input_shape, BATCH.class_count)
    state, path = spoil_statistics(network), path_architecture(network, ["conv1", "dsconv3"])
    own = evaluate(network, path, recalibrate(network, state, path, [data[0]]), *data)
    assert own.loss != pytest.approx(evaluate(network, path, state, *data).loss, rel=0.01)
    assert score_path(network, path, state, data, objective="next_token") == pytest.approx(-own.loss)
    assert score_path(network, path, state, data) == own.accuracy


@pytest.mark.parametrize("objective", ["binary_cross_entropy", "mean_squared_error"])
def test_paths_of_labels_that_are_no_classes_are_scored_by_loss(objective: Objective) -> None:
    context = context_of(BATCH)
    network, (inputs, labels) = context.network, samples(BATCH.input_shape, BATCH.class_count)
    targets = torch.nn.functional.one_hot(labels, BATCH.class_count).float()
    state, path = spoil_statistics(network), path_architecture(network, ["conv1", "dsconv3"])
    measured = recalibrate(network, state, path, [inputs])
    own = evaluate(network, path, measured, inputs, targets, objective=objective)
    assert score_path(network, path, state, (inputs, targets), objective=objective) == pytest.approx(-own.loss)


def test_a_supernets_mean_is_of_paths_with_running_statistics_of_their_own() -> None:
    context = context_of(BATCH)
    network, (inputs, _) = context.network, samples(BATCH.input_shape, BATCH.class_count)
    state, path = spoil_statistics(network), path_architecture(network, ["conv1", "dsconv3"])
    views = Views(context=context, samples=inputs)
    seen = views.prepare_tensors(
        views.of(ModelState(shared=state), Participant(client_id="", architecture=path, size=path))
    )
    expected = recalibrate(network, state, path, [inputs])
    changed = [name for name in expected if not torch.equal(expected[name], state[name])]
    assert changed
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("text", [False, True])
def test_a_generation_is_scored_by_accuracy_or_where_symbols_are_predicted_by_loss(text: bool) -> None:
    stream = torch.Generator().manual_seed(3)
    if text:
        training = TrainingSettings(objective=ObjectiveSettings(name="next_token"))
        context = context_of(TEXT, training=training)
        inputs = torch.randint(5, (40, 6), generator=stream)
        labels = torch.randint(5, (40, 6), generator=stream)
    else:
        context = context_of(SUPERNET)
        inputs, labels = samples(SUPERNET.input_shape, SUPERNET.class_count)
    network, state = context.network, init_state(context.network, 4)
    proposal = score_generation(
        context,
        RunState(round=1, aggregated_round=1, at=Searching()),
        ModelState(shared=state),
        Dataset(inputs=inputs.numpy(), labels=labels.numpy()),
    )
    assert proposal.generation is not None
    evaluations = [
        evaluate(network, path_architecture(network, path), state, inputs, labels) for path in proposal.generation.paths
    ]
    assert list(proposal.scores) == pytest.approx(
        [-evaluation.loss if text else evaluation.accuracy for evaluation in evaluations]
    )
    assert len(set(proposal.scores)) > 1
