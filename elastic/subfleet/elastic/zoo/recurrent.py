"""Recurrent language models of characters."""

from torch import Tensor, nn

__all__ = ["char_lstm"]


class _CharacterModel(nn.Module):
    def __init__(self, vocabulary: int, embedding_width: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding_width)
        self.lstm = nn.LSTM(embedding_width, width, num_layers=depth, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(outputs)
        return logits


def char_lstm(*, vocabulary: int = 80, embedding_width: int = 8, width: int = 256, depth: int = 2) -> nn.Module:
    """An LSTM over characters: (batch, tokens) of indices to the logits of each next one, (batch, tokens, vocabulary).

    The default is the Shakespeare model of federated averaging (McMahan et al. 2017, section 3) and LEAF (Caldas et
    al. 2018): 819,920 parameters.

    Args:
        vocabulary: symbols.
        embedding_width: of a symbol.
        width: of each layer's state.
        depth: layers.
    """
    return _CharacterModel(vocabulary, embedding_width, width, depth)
