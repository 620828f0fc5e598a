"""How well outputs match labels. Logits are (samples, classes), labels are class indices (samples,)."""

import numpy as np
import numpy.typing as npt

__all__ = ["accuracy", "cross_entropy"]


def accuracy(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.int64]) -> float:
    """Share of the samples whose largest logit is their label's; the first of equal ones counts.

    Raises:
        ValueError: there is no sample, or not one row of logits for each label.
    """
    _check(logits, labels)
    return float(np.mean(logits.argmax(1) == labels))


def cross_entropy(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.int64]) -> float:
    """Mean negative logarithm of the probability that softmax gives to the label, in nats.

    Raises:
        ValueError: there is no sample, or not one row of logits for each label.
    """
    _check(logits, labels)
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(1))
    return float(np.mean(log_sums - shifted[np.arange(len(labels)), labels]))


def _check(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.int64]) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise ValueError(
            f"logits of shape {logits.shape} and labels of shape {labels.shape} must be (samples, classes) and "
            "(samples,), with one sample or more"
        )
