"""What becomes of norms with running statistics, whatever the method."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import norm_tensors
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.methods.policies import Participant, Policies

__all__ = ["NormPolicy", "with_norms"]

NormPolicy = Literal["averaged", "bank", "recalibrated"]
"""How norms are shared. "averaged": gains, biases and running statistics are averaged like weights. "bank": each size
has its own, averaged among its clients alone. "recalibrated": averaged, and the running statistics are measured anew
for every subnet that is evaluated or deployed (HeteroFL's static batch norm, section 3.3)."""


def with_norms(policies: Policies, norms: NormPolicy) -> Policies:
    """A method's policies with norms shared so."""
    if norms != "bank":
        return policies

    def cohorts(network: Network, client: Participant, space: Sequence[SubnetSpec]) -> Mapping[str, str]:
        bank = dict.fromkeys(norm_tensors(network), client.size.spec_id)
        return {**bank, **policies.cohorts(network, client, space)}

    return replace(policies, cohorts=cohorts)
