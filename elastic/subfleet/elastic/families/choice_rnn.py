"""Sequence supernets: an embedding, blocks with alternative sequence operators, and a linear layer."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType

import torch
from torch import Tensor, nn

from subfleet.elastic.families.choice_block import ChoiceBlock
from subfleet.elastic.families.choice_cnn import ResidualSum
from subfleet.elastic.families.records.choices import IDENTITY, ChoiceRnn
from subfleet.elastic.families.recurrent import RecurrentLayer

_KERNEL = 5


def choice_rnn(config: ChoiceRnn) -> nn.Module:
    """A sequence supernet with logits of each next symbol, for indices (batch, tokens).

    Blocks that keep their width are residual, except for the identity operator.
    """
    width_in = config.embedding_width or config.widths[0]
    modules = OrderedDict[str, nn.Module](embedding=nn.Embedding(config.vocabulary, width_in))
    of_blocks = iter(config.of_blocks)
    for section, width in enumerate(config.widths):
        blocks = OrderedDict[str, nn.Module]()
        for name, operators in islice(of_blocks, config.depths[section]):
            own = {kind: _operator(kind, width_in, width) for kind in operators}
            blocks[name.rpartition(".")[2]] = ChoiceBlock(own)
            width_in = width
        modules[f"section{section}"] = nn.Sequential(blocks)
    modules["head"] = nn.Linear(width_in, config.class_count)
    return nn.Sequential(modules)


def _operator(name: str, width_in: int, width: int) -> nn.Module:
    operator = _OPERATORS[name](width_in, width)
    return operator if name == IDENTITY or width_in != width else ResidualSum(operator)


class _Gru(nn.Module):
    """A GRU layer with initial state 0 (Cho et al. 2014)."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width_in, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width in) to (batch, tokens, width)."""
        outputs: Tensor = self.gru(x)[0]
        return outputs


class _QuasiRnn(nn.Module):
    """A layer with a gated mean of its inputs as state, and an output gate (Bradbury et al. 2017, "fo")."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width_in, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width in) to (batch, tokens, width)."""
        candidate, forget, output = self.gates(x).chunk(3, dim=-1)
        candidate, forget = torch.tanh(candidate), torch.sigmoid(forget)
        state, states = torch.zeros_like(candidate[:, 0]), []
        for new, ratio in zip(candidate.unbind(1), forget.unbind(1), strict=True):
            state = ratio * state + (1 - ratio) * new
            states.append(state)
        return torch.sigmoid(output) * torch.stack(states, dim=1)


class _Causal(nn.Module):
    """A convolution over each token and the previous ones, and a sigmoid."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, (1, _KERNEL))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width in) to (batch, tokens, width)."""
        image = nn.functional.pad(x.transpose(1, 2).unsqueeze(2), (_KERNEL - 1, 0))
        return torch.sigmoid(self.conv(image)).squeeze(2).transpose(1, 2)


def _linear(width_in: int, width: int) -> nn.Module:
    return nn.Sequential(OrderedDict(linear=nn.Linear(width_in, width), activation=nn.Sigmoid()))


_OPERATORS: Mapping[str, Callable[[int, int], nn.Module]] = MappingProxyType(
    {
        "lstm": RecurrentLayer,
        "gru": _Gru,
        "quasi_rnn": _QuasiRnn,
        "linear": _linear,
        "conv5": _Causal,
        IDENTITY: lambda width_in, width: nn.Identity(),
    }
)
