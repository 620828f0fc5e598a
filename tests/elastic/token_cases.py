"""Tiny networks over tokens, and helpers for their tests."""

import torch
from elastic.elastic_cases import architectures, random_state
from hypothesis import strategies as st
from torch import Tensor, nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.elastic.families.records.transformers import Bert, BertClassifier, Decoder, Vit
from subfleet.elastic.network import Family, Network
from subfleet.protocol.submodel import Architecture

VIT = Vit(
    input_shape=(2, 6, 4),
    patch=2,
    class_count=3,
    widths=(10, 10),
    depths=(2, 1),
    heads=(3, 2),
    head_width=4,
    hidden_widths=(7, 5),
    norm="layer",
)
DECODER = Decoder(
    input_shape=(5,),
    vocabulary=6,
    class_count=6,
    widths=(8, 8),
    depths=(1, 2),
    heads=(2, 4),
    norm="layer",
)
BERT = Bert(
    input_shape=(6,),
    vocabulary=7,
    class_count=5,
    widths=(6,),
    depths=(3,),
    heads=(2,),
    hidden_widths=(5, 8, 4),
    norm="layer",
)
CLASSIFIER = BertClassifier(
    input_shape=(6,),
    vocabulary=7,
    class_count=4,
    widths=(6,),
    depths=(2,),
    heads=(3,),
    norm="layer",
)
LSTM = Lstm(
    input_shape=(5,),
    vocabulary=6,
    class_count=6,
    widths=(5, 4),
    depths=(2, 1),
    embedding_width=3,
    norm="none",
)
TRANSFORMERS: tuple[Family, ...] = (VIT, DECODER, BERT, CLASSIFIER)
TOKEN_CONFIGS: tuple[Family, ...] = (*TRANSFORMERS, LSTM)


@st.composite
def token_cases(draw: st.DrawFn, *, configs: tuple[Family, ...] = TOKEN_CONFIGS) -> tuple[Network, Architecture]:
    """Any of these networks, with any of its submodels."""
    network = network_of(draw(st.sampled_from(configs)))
    return network, draw(architectures(network))


def inputs_of(config: Family, batch_size: int = 4) -> Tensor:
    """Images in double precision, or sequences in which every symbol occurs."""
    symbols = network_of(config).symbols
    if not symbols:
        generator = torch.Generator().manual_seed(5)
        return torch.randn(batch_size, *config.input_shape, generator=generator, dtype=torch.float64)
    return torch.arange(batch_size * config.input_shape[0]).reshape(batch_size, -1) * 5 % symbols


def double_state(network: Network, seed: int) -> dict[str, Tensor]:
    """A full model in double precision with random gains and biases, and softmaxes that are not saturated."""
    return {name: 0.5 * tensor.double() for name, tensor in random_state(network, seed).items()}


def load_module(network: Network, architecture: Architecture, local: dict[str, Tensor]) -> nn.Module:
    """The module of a submodel with its tensors, in evaluation mode."""
    module = build_module(network, architecture).double()
    module.load_state_dict(local)
    return module.eval()
