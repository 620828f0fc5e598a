"""Networks of the package transformers, with small configurations and without its weights."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from foreign.network import ForeignNetwork
from foreign.torchvision_import import import_models
from subfleet.export.steps import SampleSpec

__all__ = ["TRANSFORMERS", "Logits"]

_CLASS_COUNT = 10
_VOCABULARY = 96
_TOKENS = SampleSpec(shape=(32,), dtype="I64", limit=_VOCABULARY)
_HIDDEN = 64


class Logits(nn.Module):
    """Wraps a network of transformers so that it returns logits instead of a data class."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """Return only the logits."""
        logits: Tensor = self.network(inputs).logits
        return logits


def _build(network: str, config: str, **options: Any) -> nn.Module:
    import_models()  # transformers imports torchvision if it is installed
    import transformers

    return Logits(getattr(transformers, network)(getattr(transformers, config)(**options)))


class ConformerTagger(nn.Module):
    """Classifies spectra with transformers' Conformer blocks."""

    def __init__(self) -> None:
        import_models()
        from transformers import Wav2Vec2ConformerConfig
        from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoderLayer

        super().__init__()
        config = Wav2Vec2ConformerConfig(
            hidden_size=_HIDDEN,
            num_attention_heads=4,
            intermediate_size=128,
            conv_depthwise_kernel_size=15,
            position_embeddings_type=None,
        )
        self.project = nn.Linear(40, _HIDDEN)
        self.blocks = nn.ModuleList([Wav2Vec2ConformerEncoderLayer(config) for _ in range(2)])
        self.head = nn.Linear(_HIDDEN, _CLASS_COUNT)

    def forward(self, spectra: Tensor) -> Tensor:
        """(batch, frames, bands) to (batch, classes)."""
        hidden = self.project(spectra)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean(dim=1))
        return logits


def _describe_network(
    name: str, network: str, config: str, sample: SampleSpec, options: Mapping[str, Any], **settings: Any
) -> ForeignNetwork:
    build: Callable[[], nn.Module] = partial(_build, network, config, **options)
    return ForeignNetwork(name=name, origin=f"transformers {network}", build=build, sample=sample, **settings)


_BERT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "num_labels": _CLASS_COUNT,
}
_DISTILBERT = {
    "vocab_size": _VOCABULARY,
    "dim": _HIDDEN,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 128,
    "max_position_embeddings": 64,
    "num_labels": _CLASS_COUNT,
}
# Training does not use the cache of these networks.
_GPT2 = {"use_cache": False, "vocab_size": _VOCABULARY, "n_embd": _HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LLAMA = {
    "use_cache": False,
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_labels": _CLASS_COUNT,
}
_WHISPER = {
    "num_mel_bins": 40,
    "max_source_positions": 50,
    "d_model": _HIDDEN,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "num_labels": _CLASS_COUNT,
}
_WAV2VEC2 = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "num_labels": _CLASS_COUNT,
    # Masks drawn by NumPy, and randomly dropped layers, cannot be repeated by a step.
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
TRANSFORMERS = (
    _describe_network("BERT", "BertForSequenceClassification", "BertConfig", _TOKENS, _BERT),
    _describe_network("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig", _TOKENS, _DISTILBERT),
    _describe_network(
        "GPT-2", "GPT2LMHeadModel", "GPT2Config", _TOKENS, _GPT2, class_count=_VOCABULARY, objective="next_token"
    ),
    _describe_network(
        "Llama", "LlamaForCausalLM", "LlamaConfig", _TOKENS, _LLAMA, class_count=_VOCABULARY, objective="next_token"
    ),
    _describe_network("ViT", "ViTForImageClassification", "ViTConfig", SampleSpec(shape=(3, 32, 32)), _VIT),
    _describe_network(
        "Whisper's encoder", "WhisperForAudioClassification", "WhisperConfig", SampleSpec(shape=(40, 100)), _WHISPER
    ),
    _describe_network(
        "wav2vec 2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SampleSpec(shape=(800,)), _WAV2VEC2
    ),
    ForeignNetwork(
        name="Conformer block",
        origin="transformers Wav2Vec2ConformerEncoderLayer",
        build=ConformerTagger,
        sample=SampleSpec(shape=(32, 40)),
    ),
)
