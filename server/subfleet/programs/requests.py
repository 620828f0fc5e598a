"""What is asked of the exporter."""

from subfleet.elastic.network import Network
from subfleet.export.requests import TrainRequest
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings

__all__ = ["train_request"]


def train_request(
    network: Network,
    spec: SubnetSpec,
    target: str,
    training: TrainingSettings,
    *,
    student: SubnetSpec | None = None,
) -> TrainRequest:
    """What is asked of the exporter for a subnet that is to be trained so."""
    return TrainRequest(
        model=network.config,
        spec=spec,
        target=target,
        batch_size=training.program_batch_size,
        objective=training.objective,
        optimiser=training.optimiser,
        accumulate=training.micro_batch_size > 0,
        recompute=training.recompute,
        one_part=training.micro_batch_size == training.batch_size,
        student=student,
    )
