"""Recurrent language models of characters."""

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

__all__ = ["CHAR_LSTM", "RecurrentLayer", "char_lstm"]

CHAR_LSTM: Mapping[str, Mapping[str, int]] = MappingProxyType({"section0": {"block0": 256, "block1": 256}})
"""Widths of the layers by name, by section: two layers of 256 (McMahan et al. 2017, section 3)."""


class RecurrentLayer(nn.Module):
    """One LSTM layer whose state starts at zero (Hochreiter and Schmidhuber 1997).

    Args:
        width_in: of its inputs.
        width: of its state.
    """

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width_in, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width in) to (batch, tokens, width)."""
        outputs: Tensor = self.lstm(x)[0]
        return outputs


def char_lstm(
    *,
    vocabulary: int = 80,
    embedding_width: int = 8,
    sections: Mapping[str, Mapping[str, int]] = CHAR_LSTM,
    class_count: int = 80,
) -> nn.Module:
    """An LSTM over characters: (batch, tokens) of indices to the logits of each next one, (batch, tokens, classes).

    The default is the Shakespeare model of federated averaging (McMahan et al. 2017, section 3) and LEAF (Caldas et
    al. 2018): 819,920 parameters.

    Args:
        vocabulary: symbols.
        embedding_width: of a symbol.
        sections: widths of the layers by name, by the name of the section that they are in.
        class_count: logits of a token.
    """
    layers = OrderedDict[str, nn.Module](embedding=nn.Embedding(vocabulary, embedding_width))
    width_in = embedding_width
    for section, widths in sections.items():
        stack = OrderedDict[str, nn.Module]()
        for name, width in widths.items():
            stack[name] = RecurrentLayer(width_in, width)
            width_in = width
        layers[section] = nn.Sequential(stack)
    layers["head"] = nn.Linear(width_in, class_count)
    return nn.Sequential(layers)
