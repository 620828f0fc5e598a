"""LSTMs over symbols: layers of one section have states of one axis, so that those after its first can be left out."""

from collections import OrderedDict
from types import MappingProxyType

from torch import Tensor, nn

from subfleet.elastic.axes import Axis, Dim, Product
from subfleet.elastic.families.blueprint import check_used
from subfleet.elastic.families.declaring import Declarer
from subfleet.elastic.network import Block, LocalShapes, ModelConfig, Network, TensorDecl
from subfleet.protocol.errors import ConfigError

__all__ = ["build_lstm", "declare_lstm"]

_EMBEDDING = "embedding"
_GATES = 4


def declare_lstm(config: ModelConfig) -> Network:
    """Declare an LSTM that gives logits of each next symbol of (tokens,) symbols.

    A section's layers have states of the section's width.

    Raises:
        ConfigError: the input is no sequence of symbols, or a setting does not fit.
    """
    check_used(config, {"vocabulary", "embedding_width"}, {"none"})
    if len(config.input_shape) != 1 or not config.vocabulary:
        raise ConfigError(
            f"input_shape is {config.input_shape} and vocabulary is {config.vocabulary}, but family "
            f"{config.family!r} needs (tokens,) and 1 symbol or more"
        )
    axes = {
        "class": Axis(name="class", size=config.class_count, kind="class", granularity=config.class_count),
        _EMBEDDING: Axis(name=_EMBEDDING, size=config.embedding_width or config.widths[0], kind="embed"),
    }
    for section, width in enumerate(config.widths):
        axes[_state(section)] = Axis(name=_state(section), size=width, kind="channel")
    declare = Declarer({name: axis.size for name, axis in axes.items()})
    tensors = [declare.tensor("embedding.weight", (config.vocabulary, _EMBEDDING), "symbol")]
    blocks = []
    width_in = _EMBEDDING
    for section, depth in enumerate(config.depths):
        for position in range(depth):
            name = _layer_name(section, position)
            tensors += _layer_tensors(declare, name, width_in, _state(section), config.input_shape[0], position > 0)
            blocks += [Block(name=name, section=section)] * (position > 0)
            width_in = _state(section)
    tensors += declare.layer("head", ("class", width_in), positions=config.input_shape[0])
    return Network(
        config=config,
        axes=MappingProxyType(axes),
        blocks=tuple(blocks),
        tensors=MappingProxyType({decl.name: decl for decl in tensors}),
    )


def build_lstm(config: ModelConfig, local: LocalShapes) -> nn.Module:
    """The module of an LSTM, for indices (batch, tokens)."""
    width_in = local.sizes[_EMBEDDING]
    layers = OrderedDict[str, nn.Module](embedding=nn.Embedding(config.vocabulary, width_in))
    for section, depth in enumerate(config.depths):
        width, stack = local.sizes[_state(section)], OrderedDict[str, nn.Module]()
        for position in range(depth):
            if f"{_layer_name(section, position)}.lstm.weight_ih_l0" in local.tensors:
                stack[f"block{position}"] = RecurrentLayer(width_in, width)
                width_in = width
        layers[f"section{section}"] = nn.Sequential(stack)
    layers["head"] = nn.Linear(width_in, config.class_count)
    return nn.Sequential(layers)


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


def _layer_name(section: int, position: int) -> str:
    return f"section{section}.block{position}"


def _state(section: int) -> str:
    return f"section{section}.state"


def _layer_tensors(
    declare: Declarer, name: str, width_in: str, state: str, tokens: int, skippable: bool
) -> list[TensorDecl]:
    """Of one layer, in PyTorch's names: rows are the gates side by side, each as wide as the state."""
    gates: Dim = Product(factors=(_GATES, state))
    block = name if skippable else None
    return [
        declare.tensor(f"{name}.lstm.weight_ih_l0", (gates, width_in), "weight", block=block, positions=tokens),
        declare.tensor(f"{name}.lstm.weight_hh_l0", (gates, state), "weight", block=block, positions=tokens),
        declare.tensor(f"{name}.lstm.bias_ih_l0", (gates,), "bias", block=block, positions=tokens),
        declare.tensor(f"{name}.lstm.bias_hh_l0", (gates,), "bias", block=block, positions=tokens),
    ]
