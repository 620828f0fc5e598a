"""Multilayer perceptrons."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

from torch import nn

__all__ = ["mlp"]


def mlp(
    *,
    input_size: int = 784,
    widths: tuple[int, ...] = (200, 200),
    class_count: int = 10,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Module:
    """Linear layers with activations between them; inputs (batch, ...) are flattened.

    The default is the "2NN" of federated averaging (McMahan et al. 2017, section 3): 199,210 parameters.

    Args:
        input_size: values of one sample.
        widths: of each hidden layer, from the input on.
        class_count: logits of a sample.
        activation: after each hidden layer.
    """
    layers = OrderedDict[str, nn.Module](flatten=nn.Flatten())
    for position, (width_in, width) in enumerate(pairwise((input_size, *widths))):
        layers[f"hidden{position}"] = nn.Linear(width_in, width)
        layers[f"activation{position}"] = activation()
    layers["head"] = nn.Linear(widths[-1] if widths else input_size, class_count)
    return nn.Sequential(layers)
