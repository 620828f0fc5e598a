"""Requests to the exporter follow from the training of a round."""

from dataclasses import replace

import pytest
from server.coordinator_cases import context_of

from subfleet.programs.supply import build_train_request
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.tasks import derive_score_training


@pytest.mark.parametrize(("micro_batch_size", "part_size", "one_part"), [(0, 8, True), (8, 8, True), (3, 3, False)])
def test_a_batch_that_is_trained_at_once_is_scored_at_once(
    micro_batch_size: int, part_size: int, one_part: bool
) -> None:
    network = context_of().network
    training = TrainingSettings(batch_size=8, micro_batch_size=micro_batch_size)
    trained = build_train_request(network, network.full_architecture(), "onnx", training)
    assert (trained.batch_size, trained.accumulate) == (part_size, micro_batch_size > 0)
    scored = build_train_request(network, network.full_architecture(), "onnx", derive_score_training(training))
    assert (scored.batch_size, scored.accumulate, scored.one_part) == (part_size, True, one_part)
    assert (
        replace(trained, accumulate=True, one_part=one_part).program_id
        == replace(scored, optimiser=trained.optimiser).program_id
    )
