"""What becomes of norms with running statistics, whatever the method."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from subfleet.elastic.network import Network
from subfleet.elastic.norm_layers import norm_layers, norm_tensors
from subfleet.methods.policies import Participant, Policies
from subfleet.protocol.calibration import Calibration
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings

__all__ = ["NormPolicy", "calibration_of", "calibration_training", "with_norms"]

NormPolicy = Literal["averaged", "bank", "recalibrated", "calibrated"]
"""How norms are shared. "averaged": gains, biases and running statistics are averaged like weights. "bank": each size
has its own, averaged among its clients alone. "recalibrated": averaged, and the running statistics are measured anew
for every subnet that is evaluated or deployed (HeteroFL's static batch norm, section 3.3). "calibrated": averaged, and
in rounds of their own devices measure the running statistics, each of its subnet on its own data."""


def with_norms(policies: Policies, norms: NormPolicy) -> Policies:
    """A method's policies with norms shared so."""
    policies = replace(policies, recalibrates=norms == "recalibrated")
    if norms != "bank":
        return policies

    def cohorts(network: Network, client: Participant, sizes: Sequence[SubnetSpec]) -> Mapping[str, str]:
        bank = dict.fromkeys(norm_tensors(network), client.size.spec_id)
        return {**bank, **policies.cohorts(network, client, sizes)}

    return replace(policies, cohorts=cohorts)


def calibration_training(training: TrainingSettings) -> TrainingSettings:
    """The settings with which the program of a round's local training measures norms: one pass that moves nothing."""
    return replace(training, epochs=1, local_steps=0, learning_rate=0.0)


def calibration_of(network: Network, size: SubnetSpec) -> Calibration:
    """What a device is asked to measure of a size.

    Raises:
        ValueError: the network has no norm with running statistics; a configuration that asks for this is refused.
    """
    return Calibration(norms=norm_layers(network, size))
