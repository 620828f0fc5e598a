"""How good a subnet of the current model is."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from subfleet.elastic.building import build_module
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.protocol.errors import DataError
from subfleet.protocol.subnet import SubnetSpec

__all__ = ["Evaluation", "evaluate", "evaluate_many"]

_LARGEST_EXPONENT = 709
"""The exponential of a larger number is no float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What came of it.

    Attributes:
        accuracy: share of the labels that were predicted, 0 to 1.
        loss: mean cross-entropy of a label, in nats.
        label_count: labels that count: one of each sample, or of each token that is no padding.
    """

    accuracy: float
    loss: float
    label_count: int

    @property
    def perplexity(self) -> float:
        """Exponential of the loss: among how many equally likely symbols a language model is as unsure."""
        return math.inf if self.loss > _LARGEST_EXPONENT else math.exp(self.loss)


def evaluate(
    network: Network,
    spec: SubnetSpec,
    state: Mapping[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    *,
    batch_size: int = 256,
) -> Evaluation:
    """Evaluate a subnet, cut from the full model, on labelled samples, where the model's tensors are.

    Args:
        network: the declaration.
        spec: the subnet.
        state: the full model's tensors by name.
        inputs: (samples, *input_shape); float32, or int64 of symbols.
        labels: int64 (samples,), or (samples, tokens) where the network gives logits of each token; a token with a
            label below 0 is padding and does not count.
        batch_size: samples at a time; bounds the memory and does not change the result.

    Raises:
        ConfigError: the spec is no subnet of this network, or the state lacks one of its tensors.
        DataError: no label counts, the counts of inputs and labels differ, or the labels are not those that the
            network predicts.
    """
    return evaluate_many(network, spec, state, [(inputs, labels)], batch_size=batch_size)[0]


def evaluate_many(
    network: Network,
    spec: SubnetSpec,
    state: Mapping[str, Tensor],
    datasets: Iterable[tuple[Tensor, Tensor]],
    *,
    batch_size: int = 256,
) -> list[Evaluation]:
    """Evaluate a subnet on each of several data sets, such as those of all clients; see `evaluate`.

    Args:
        network: the declaration.
        spec: the subnet.
        state: the full model's tensors by name.
        datasets: inputs and labels of each.
        batch_size: samples at a time.

    Raises:
        ConfigError: the spec is no subnet of this network, or the state lacks one of its tensors.
        DataError: of a data set, no label counts, the counts of inputs and labels differ, or the labels are not those
            that the network predicts.
    """
    local = extract(network, spec, state)
    module = build_module(network, spec)
    # The module takes over the extracted tensors, on whatever device they are.
    module.load_state_dict(local, assign=True)
    module.eval()
    device = next(iter(local.values())).device
    return [_evaluate(module, inputs, labels, batch_size, device) for inputs, labels in datasets]


def _evaluate(module: nn.Module, inputs: Tensor, labels: Tensor, batch_size: int, device: torch.device) -> Evaluation:
    if len(labels) == 0 or len(inputs) != len(labels):
        raise DataError(
            f"there are {len(inputs)} inputs and {len(labels)} labels, but there must be equally many, at least 1"
        )
    count, correct, loss = 0, 0, 0.0
    with torch.inference_mode():
        for batch, expected in zip(torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True):
            logits, wanted = module(batch.to(device)), expected.to(device)
            if logits.shape[:-1] != wanted.shape:
                raise DataError(
                    f"labels of {len(wanted)} samples are of the shape {tuple(wanted.shape)}, but the network predicts "
                    f"{tuple(logits.shape[:-1])}; give a label for each of its predictions"
                )
            if int(wanted.max()) >= logits.shape[-1]:
                raise DataError(
                    f"a label is {int(wanted.max())}, but must be below {logits.shape[-1]}, the network's classes"
                )
            counted = wanted >= 0
            logits, wanted = logits[counted], wanted[counted]
            count += len(wanted)
            correct += int((logits.argmax(dim=-1) == wanted).sum())
            loss += float(cross_entropy(logits, wanted, reduction="sum"))
    if count == 0:
        raise DataError(f"all labels of {len(labels)} samples are padding, but at least 1 must be 0 or more")
    return Evaluation(accuracy=correct / count, loss=loss / count, label_count=count)
