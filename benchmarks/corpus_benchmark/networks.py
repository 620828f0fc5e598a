"""Makes the networks of the corpus, each by its authors' own code, with a small input and random weights."""

import collections
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomllib
import torch
from foreign.torchvision_import import import_models
from torch import Tensor, nn

__all__ = ["SMOKE", "CorpusNetwork", "count_parameters", "draw_inputs", "list_networks", "make_seeded"]

_CLASSES = 10
_VOCABULARY, _TOKENS = 100, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusNetwork:
    """A network of the corpus.

    Attributes:
        name: the package and its name there, such as "timm dla46x_c".
        make: makes the module.
        input_shape: shape of one sample.
        symbols: size of the vocabulary if inputs are tokens; 0 if they are numbers.
    """

    name: str
    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    symbols: int = 0


class Logits(nn.Module):
    """Returns one of the results of a network that returns several."""

    def __init__(self, network: nn.Module, key: str) -> None:
        super().__init__()
        self.network, self.key = network, key

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits for a batch."""
        outputs = self.network(inputs)
        logits: Tensor = outputs[self.key] if isinstance(outputs, Mapping) else getattr(outputs, self.key)
        return logits


class Pooled(nn.Module):
    """Classifies the last level of a backbone's features."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """The logits for a batch."""
        *_, last = self.backbone(images).values()
        logits: Tensor = self.head(last.mean((2, 3)))
        return logits


def list_networks() -> dict[str, CorpusNetwork]:
    """All networks of the corpus by name, in the order of the list; none is made."""
    listed = tomllib.loads(Path(__file__).with_name("networks.toml").read_text(encoding="utf-8"))
    networks = [
        *(_describe_torchvision(name) for name in listed["torchvision"]["classification"]),
        *(_describe_segmentation(name) for name in listed["torchvision"]["segmentation"]),
        *(_describe_detection(name) for name in listed["torchvision"]["detection"]),
        *(_describe_timm(name) for name in listed["timm"]["classification"]),
        *(_describe_transformers(name) for name in listed["transformers"]["model_types"]),
        *(_OTHERS[name] for name in listed["others"]),
    ]
    return {network.name: network for network in networks}


_SIDES: Mapping[str, int] = MappingProxyType({"maxvit_t": 224, "inception_v3": 96})
"""Side of images of torchvision's networks that need larger ones than 64 pixels."""


def _describe_torchvision(name: str) -> CorpusNetwork:
    side = _SIDES.get(name, 64)
    options: dict[str, Any] = {"num_classes": _CLASSES}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}
    if name.startswith("vit_"):
        options["image_size"] = side
    return CorpusNetwork(
        name=f"torchvision {name}",
        make=lambda: getattr(import_models(), name)(weights=None, **options),
        input_shape=(3, side, side),
    )


def _describe_segmentation(name: str) -> CorpusNetwork:
    def make() -> nn.Module:
        build = getattr(import_models().segmentation, name)
        return Logits(build(weights=None, weights_backbone=None, num_classes=_CLASSES), "out")

    return CorpusNetwork(name=f"torchvision {name}", make=make, input_shape=(3, 64, 64))


def _describe_detection(name: str) -> CorpusNetwork:
    def make() -> nn.Module:
        detector = getattr(import_models().detection, name)(weights=None, weights_backbone=None)
        return Pooled(detector.backbone, 256)

    return CorpusNetwork(name=f"torchvision {name}", make=make, input_shape=(3, 64, 64))


_TIMM_SIDES: Mapping[str, int] = MappingProxyType(
    {"test_vit": 160, "test_vit_relpos": 160, "swinv2_tiny_window8_256": 256, "crossvit_tiny_240": 240}
)


def _describe_timm(name: str) -> CorpusNetwork:
    def make() -> nn.Module:
        import_models()  # timm imports torchvision
        import timm

        network: nn.Module = timm.create_model(name, pretrained=False, num_classes=_CLASSES)
        return network

    return CorpusNetwork(name=f"timm {name}", make=make, input_shape=(3, *[_timm_side(name)] * 2))


def _timm_side(name: str) -> int:
    """The side of the images of a network of timm."""
    return _TIMM_SIDES.get(name, 224)


_SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": _VOCABULARY, "num_labels": _CLASSES, "max_position_embeddings": 64, "image_size": 32,
        "patch_size": 8, "pad_token_id": 0,
    }
)  # fmt: skip
_SOUND_LAYERS: Mapping[str, Any] = MappingProxyType(
    {
        "apply_spec_augment": False, "layerdrop": 0.0, "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3),
        "conv_stride": (5, 2, 2),
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    }
)  # fmt: skip
_OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "albert": {"embedding_size": 32},
        "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
        "electra": {"embedding_size": 32},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": None},
        "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
        "segformer": {"num_attention_heads": (1, 2, 4, 4), "hidden_sizes": (16, 32, 64, 64), "depths": (1, 1, 1, 1),
                      "decoder_hidden_size": 64},
        "hubert": _SOUND_LAYERS,
        "wav2vec2": _SOUND_LAYERS,
        "whisper": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
                    "num_mel_bins": 16, "max_source_positions": 32},
    }
)  # fmt: skip
_DECODERS = ("gpt2", "gpt_neox", "llama", "opt")
_IMAGES = ("deit", "segformer", "vit")
_SOUNDS: Mapping[str, tuple[int, ...]] = MappingProxyType({"hubert": (800,), "wav2vec2": (800,), "whisper": (16, 64)})


def _describe_transformers(kind: str) -> CorpusNetwork:
    def make() -> nn.Module:
        import_models()  # transformers imports torchvision
        import transformers

        heads = (
            "AutoModelForCausalLM" if kind in _DECODERS
            else "DeiTForImageClassification" if kind == "deit"
            else "AutoModelForImageClassification" if kind in _IMAGES
            else "AutoModelForAudioClassification" if kind in _SOUNDS
            else "AutoModelForSequenceClassification"
        )  # fmt: skip
        config = transformers.AutoConfig.for_model(kind, **{**_SMALL, **_OWN.get(kind, {}), "use_cache": False})
        kind_of_model = getattr(transformers, heads)
        return Logits(kind_of_model(config) if kind == "deit" else kind_of_model.from_config(config), "logits")

    if kind in _SOUNDS:
        return CorpusNetwork(name=f"transformers {kind}", make=make, input_shape=_SOUNDS[kind])
    if kind in _IMAGES:
        return CorpusNetwork(name=f"transformers {kind}", make=make, input_shape=(3, 32, 32))
    return CorpusNetwork(name=f"transformers {kind}", make=make, input_shape=(_TOKENS,), symbols=_VOCABULARY)


def _load(path: str) -> Any:
    import_models()  # some of the packages import torchvision
    vars(collections).setdefault("Iterable", Iterable)  # as nfnets expects of an older Python
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _make_x_transformer() -> nn.Module:
    encoder = _load("x_transformers:Encoder")(dim=64, depth=2, heads=4)
    wrapper: nn.Module = _load("x_transformers:TransformerWrapper")(
        num_tokens=_VOCABULARY, max_seq_len=_TOKENS, attn_layers=encoder
    )
    return wrapper


def _make_nfnet() -> nn.Module:
    network: nn.Module = import_models().resnet18(num_classes=_CLASSES)
    _load("nfnets:replace_conv")(network, _load("nfnets:WSConv2d"))
    return network


_OTHERS: Mapping[str, CorpusNetwork] = MappingProxyType(
    {
        network.name: network
        for network in (
            CorpusNetwork(
                name="efficientnet-pytorch",
                make=lambda: _load("efficientnet_pytorch:EfficientNet").from_name("efficientnet-b0", num_classes=10),
                input_shape=(3, 64, 64),
            ),
            CorpusNetwork(
                name="segmentation-models-pytorch",
                make=lambda: _load("segmentation_models_pytorch:Unet")("resnet18", encoder_weights=None, classes=10),
                input_shape=(3, 64, 64),
            ),
            CorpusNetwork(
                name="vit-pytorch",
                make=lambda: _load("vit_pytorch:SimpleViT")(
                    image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128
                ),
                input_shape=(3, 32, 32),
            ),
            CorpusNetwork(name="x-transformers", make=_make_x_transformer, input_shape=(_TOKENS,), symbols=_VOCABULARY),
            CorpusNetwork(
                name="monai",
                make=lambda: _load("monai.networks.nets:UNet")(
                    spatial_dims=2, in_channels=3, out_channels=10, channels=(16, 32, 64), strides=(2, 2)
                ),
                input_shape=(3, 32, 32),
            ),
            CorpusNetwork(
                name="pytorchcv",
                make=lambda: _load("pytorchcv.model_provider:get_model")("resnet20_cifar10"),
                input_shape=(3, 32, 32),
            ),
            CorpusNetwork(
                name="kornia",
                make=lambda: nn.Sequential(
                    _load("kornia.models.vit:VisionTransformer")(
                        image_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4
                    ),
                    nn.Linear(64, _CLASSES),
                ),
                input_shape=(3, 32, 32),
            ),
            CorpusNetwork(
                name="conformer",
                make=lambda: nn.Sequential(
                    _load("conformer:Conformer")(
                        dim=64, depth=2, dim_head=16, heads=4, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=7
                    ),
                    nn.Linear(64, _CLASSES),
                ),
                input_shape=(16, 64),
            ),
            CorpusNetwork(
                name="pytorch-tcn",
                make=lambda: nn.Sequential(
                    _load("pytorch_tcn:TCN")(8, [32, 32], output_projection=None), nn.Flatten(), nn.LazyLinear(10)
                ),
                input_shape=(8, 32),
            ),
            CorpusNetwork(
                name="nfnets-pytorch",
                make=_make_nfnet,
                input_shape=(3, 64, 64),
            ),
        )
    }
)
"""Networks of other packages by the name of the package."""


SMOKE = CorpusNetwork(
    name="pytorch",
    make=lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 3)),
    input_shape=(4, 8),
)
"""A network for `--smoke`, which needs no package."""


def count_parameters(module: nn.Module) -> int:
    """The number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def draw_inputs(network: CorpusNetwork, count: int, seed: int) -> Tensor:
    """A random batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *network.input_shape)
    if network.symbols:
        return torch.randint(network.symbols, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def make_seeded(network: CorpusNetwork) -> nn.Module:
    """Make a network with the same random weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # noqa: TID251 - the packages draw their first weights
        return network.make()
