"""Evaluate submodels of the current model on labelled data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from subfleet.elastic.building import sized_module
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.protocol.errors import DataError
from subfleet.protocol.metric_sums import Totals
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task_kinds import TASK_KINDS, Objective, TaskKind, compute_metrics
from subfleet.tasks.metrics import MetricTally


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        kind: kind of the task.
        totals: sums over the labels that count: one for each sample, each token or pixel except padding, or each
            output.
        outputs: number of outputs of the network for each prediction.
    """

    kind: TaskKind
    totals: Totals
    outputs: int

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of this kind of task, the headline first."""
        return compute_metrics(self.kind, self.totals)

    @property
    def accuracy(self) -> float:
        """Fraction of correctly predicted labels, 0 to 1; 0 if not applicable."""
        return self.totals.correct / self.totals.label_count

    @property
    def loss(self) -> float:
        """Mean loss per label."""
        return self.totals.loss / self.totals.label_count

    @property
    def guess_loss(self) -> float:
        """Mean loss per label of the best guess without inputs."""
        return self.kind.guess_loss(self.outputs, self.totals)

    @property
    def label_count(self) -> int:
        """Number of labels that count."""
        return self.totals.label_count


def evaluate(  # noqa: PLR0913 - independent settings
    network: Network,
    architecture: Architecture,
    state: Mapping[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    *,
    objective: Objective = "cross_entropy",
    batch_size: int = 256,
) -> EvaluationResult:
    """Evaluate a submodel of the full model on labelled samples, on the device of the model's tensors.

    Args:
        network: the network.
        architecture: the submodel.
        state: the full model's tensors by name.
        inputs: (samples, *input_shape); float32, or int64 symbols.
        labels: int64 (samples,), or (samples, *positions) if the network has logits of each token or pixel; labels
            below 0 do not count. Or float32 targets (samples, ..., outputs).
        objective: objective of the loss.
        batch_size: samples per batch; limits memory and does not change the result.

    Raises:
        ConfigError: the architecture is not a submodel of this network, or the state lacks one of its tensors.
        DataError: no label counts, the numbers of inputs and labels differ, or the labels do not match the network's
            outputs.
    """
    data = [(inputs, labels)]
    return evaluate_many(network, architecture, state, data, objective=objective, batch_size=batch_size)[0]


def evaluate_many(
    network: Network,
    architecture: Architecture,
    state: Mapping[str, Tensor],
    datasets: Iterable[tuple[Tensor, Tensor]],
    *,
    objective: Objective = "cross_entropy",
    batch_size: int = 256,
) -> list[EvaluationResult]:
    """Evaluate a submodel on each of several data sets, such as those of all clients; see `evaluate`.

    Args:
        network: the network.
        architecture: the submodel.
        state: the full model's tensors by name.
        datasets: inputs and labels of each data set.
        objective: objective of the loss.
        batch_size: samples per batch.

    Raises:
        ConfigError: the architecture is not a submodel of this network, or the state lacks one of its tensors.
        DataError: in a data set no label counts, the numbers of inputs and labels differ, or the labels do not match
            the network's outputs.
    """
    local = extract(network, architecture, state)
    module = sized_module(network.config, network.local(architecture))
    # The module takes over the extracted tensors and their device.
    module.load_state_dict(local, assign=True)
    module.eval()
    device = next(iter(local.values())).device
    return [_evaluate(module, inputs, labels, objective, batch_size, device) for inputs, labels in datasets]


def _evaluate(
    module: nn.Module, inputs: Tensor, labels: Tensor, objective: Objective, batch_size: int, device: torch.device
) -> EvaluationResult:
    if len(labels) == 0 or len(inputs) != len(labels):
        raise DataError(
            f"there are {len(inputs)} inputs and {len(labels)} labels, but both need the same number, at least 1"
        )
    kind, tally, loss, outputs = TASK_KINDS[objective], None, 0.0, 0
    with torch.inference_mode():
        for batch, expected in zip(torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True):
            logits, targets = module(batch.to(device)), expected.to(device)
            _check_fit(kind, logits, targets)
            outputs = logits.shape[-1]
            tally = tally or MetricTally(kind, outputs, by_class=True)
            tally.add(np.asarray(logits.cpu()), np.asarray(expected.cpu()))
            loss += _loss(objective, logits, targets)
    totals = None if tally is None else tally.totals(loss)
    if totals is None or totals.label_count == 0:
        raise DataError(f"all labels of {len(labels)} samples are padding, but at least 1 must be 0 or more")
    return EvaluationResult(kind=kind, totals=totals, outputs=outputs)


def _check_fit(kind: TaskKind, logits: Tensor, labels: Tensor) -> None:
    predicted = logits.shape[:-1] if kind.over_classes else logits.shape
    if predicted != labels.shape:
        raise DataError(
            f"labels of {len(labels)} samples have the shape {tuple(labels.shape)}, but the network predicts "
            f"{tuple(predicted)}; give a label for each prediction"
        )
    if kind.over_classes and int(labels.max()) >= logits.shape[-1]:
        raise DataError(
            f"a label is {int(labels.max())}, but must be below {logits.shape[-1]}, the number of the network's classes"
        )


def _loss(objective: Objective, logits: Tensor, labels: Tensor) -> float:
    """The summed loss of the labels that count."""
    if objective == "mean_squared_error":
        return float(functional.mse_loss(logits, labels, reduction="sum"))
    if objective == "binary_cross_entropy":
        return float(functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum"))
    counted = labels >= 0
    return float(functional.cross_entropy(logits[counted], labels[counted], reduction="sum"))
