"""How good a subnet of the current model is."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from subfleet.elastic.families import build_module
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.protocol.errors import DataError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What came of it.

    Attributes:
        accuracy: share of the samples whose class was predicted, 0 to 1.
        loss: mean cross-entropy, in nats.
    """

    accuracy: float
    loss: float


def evaluate(
    network: Network,
    spec: SubnetSpec,
    state: Mapping[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    *,
    batch_size: int = 256,
) -> Evaluation:
    """Evaluate a subnet, cut from the full model, on labelled samples.

    Args:
        network: the declaration.
        spec: the subnet.
        state: the full model's tensors by name.
        inputs: float32 (samples, *input_shape).
        labels: int64 (samples,).
        batch_size: samples at a time; bounds the memory and does not change the result.

    Raises:
        ConfigError: the spec is no subnet of this network, or the state lacks one of its tensors.
        DataError: there is no sample, or the counts of inputs and labels differ.
    """
    count = len(labels)
    if count == 0 or len(inputs) != count:
        raise DataError(
            f"there are {len(inputs)} inputs and {count} labels, but there must be equally many, at least 1"
        )
    module = build_module(network, spec)
    module.load_state_dict(extract(network, spec, state))
    module.eval()
    correct, loss = 0, 0.0
    with torch.inference_mode():
        for batch, expected in zip(torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True):
            logits = module(batch)
            correct += int((logits.argmax(dim=1) == expected).sum())
            loss += float(cross_entropy(logits, expected, reduction="sum"))
    return Evaluation(accuracy=correct / count, loss=loss / count)
