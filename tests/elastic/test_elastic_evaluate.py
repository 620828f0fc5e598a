import math

import pytest
import torch
from elastic.elastic_cases import MLP, random_state
from elastic.token_cases import DECODER, inputs_of

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.evaluate import evaluate, evaluate_many
from subfleet.elastic.maps import extract
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import DataError


def test_it_is_the_accuracy_and_loss_of_the_submodel_itself() -> None:
    network = network_of(MLP)
    state, architecture = random_state(network, 1), uniform_space(network, (0.5, 1))[1]
    inputs = torch.randn(37, 5, generator=torch.Generator().manual_seed(2))
    module = build_module(network, architecture)
    module.load_state_dict(extract(network, architecture, state))
    logits = module(inputs).detach()
    labels = logits.argmax(dim=1)
    labels[:10] = (labels[:10] + 1) % 4
    for batch_size in (5, 37, 256):
        result = evaluate(network, architecture, state, inputs, labels, batch_size=batch_size)
        assert result.accuracy == 27 / 37
        assert result.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-4)


@pytest.mark.parametrize(("inputs", "labels"), [(0, 0), (3, 2)])
def test_samples_must_be_there_and_labelled(inputs: int, labels: int) -> None:
    network = network_of(MLP)
    with pytest.raises(DataError, match="both need the same number"):
        evaluate(
            network,
            network.full_architecture(),
            random_state(network, 1),
            torch.zeros(inputs, 5),
            torch.zeros(labels, dtype=torch.int64),
        )


def test_tokens_count_unless_they_are_padding() -> None:
    network = network_of(DECODER)
    state, architecture, inputs = random_state(network, 1), network.full_architecture(), inputs_of(DECODER, 4)
    module = build_module(network, architecture)
    module.load_state_dict(state)
    logits = module(inputs).detach()
    labels = logits.argmax(dim=-1)
    labels[0, 0] = (labels[0, 0] + 1) % 6
    labels[1:, 3:] = -1
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
    for batch_size in (1, 3, 9):
        result = evaluate(network, architecture, state, inputs, labels, objective="next_token", batch_size=batch_size)
        assert (result.accuracy, result.label_count) == (13 / 14, 14)
        assert result.loss == pytest.approx(float(expected), rel=1e-4)
        assert result.metrics["perplexity"] == math.exp(result.loss)
    # A data set may begin with a batch of nothing but padding.
    labels[0] = -1
    assert evaluate(network, architecture, state, inputs, labels, batch_size=1).label_count == 9


def test_each_of_several_data_sets_is_judged_on_its_own() -> None:
    network = network_of(MLP)
    state, architecture = random_state(network, 1), network.full_architecture()
    inputs, labels = torch.randn(9, 5, generator=torch.Generator().manual_seed(2)), torch.arange(9) % 4
    parts = [(inputs[:2], labels[:2]), (inputs[2:], labels[2:])]
    assert evaluate_many(network, architecture, state, parts) == [
        evaluate(network, architecture, state, *part) for part in parts
    ]


def test_a_submodel_is_evaluated_where_the_model_is(device: torch.device) -> None:
    network = network_of(DECODER)
    state, inputs = random_state(network, 1), inputs_of(DECODER, 4)
    labels = inputs.roll(-1, dims=1)
    expected = evaluate(network, network.full_architecture(), state, inputs, labels)
    moved = {name: tensor.to(device) for name, tensor in state.items()}
    result = evaluate(network, network.full_architecture(), moved, inputs, labels)
    assert result.accuracy == expected.accuracy
    assert result.loss == pytest.approx(expected.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (torch.full((2, 5), -1), "all labels of 2 samples are padding"),
        (torch.zeros(2, dtype=torch.int64), r"have the shape \(2,\), but the network predicts \(2, 5\)"),
        (torch.full((2, 5), 6), "a label is 6, but must be below 6"),
    ],
)
def test_labels_must_match_the_predictions(labels: torch.Tensor, reason: str) -> None:
    network = network_of(DECODER)
    with pytest.raises(DataError, match=reason):
        evaluate(network, network.full_architecture(), random_state(network, 1), inputs_of(DECODER, 2), labels)
