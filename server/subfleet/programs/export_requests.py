"""What is asked of the exporter."""

from dataclasses import replace

from subfleet.elastic.network import Network
from subfleet.export.requests import EvaluateRequest, TrainRequest
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings

__all__ = ["alone", "evaluate_request", "train_request"]


def alone(architecture: Architecture) -> Architecture:
    """A submodel as the exporter knows it: of the settings that a request names, whatever network of a run has these.

    So networks of the same settings have the same programs, which are written once; whatever a run knows of them it
    knows by the network, too.
    """
    return replace(architecture, network="")


def train_request(
    network: Network,
    architecture: Architecture,
    target: str,
    training: TrainingSettings,
    *,
    student: Architecture | None = None,
) -> TrainRequest:
    """What is asked of the exporter for a submodel that is to be trained so."""
    return TrainRequest(
        model=network.config,
        architecture=alone(architecture),
        target=target,
        batch_size=training.program_batch_size,
        objective=training.objective,
        optimiser=training.optimiser,
        accumulate=training.micro_batch_size > 0,
        recompute=training.recompute,
        one_part=training.micro_batch_size == training.batch_size,
        student=None if student is None else alone(student),
    )


def evaluate_request(
    network: Network, architecture: Architecture, target: str, training: TrainingSettings
) -> EvaluateRequest:
    """What is asked of the exporter for a submodel that is to be evaluated, by the plain objective of its training."""
    return EvaluateRequest(
        model=network.config,
        architecture=alone(architecture),
        target=target,
        batch_size=training.program_batch_size,
        objective=training.objective.plain,
    )
