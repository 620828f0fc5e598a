"""Settings of families: each record has only its own, is read by its name, and is checked without PyTorch."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from elastic.elastic_cases import CONFIGS, CONVOLUTIONAL, MLP, RESNET
from elastic.token_cases import DECODER, LSTM, TOKEN_CONFIGS, VIT

from subfleet.elastic.building import network_of
from subfleet.elastic.families import FAMILIES, PRESETS, AnyFamily, preset
from subfleet.elastic.network import Family
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.schema import from_plain, to_plain

OPEN: Any = AnyFamily
TORCH_FREE = """
import sys
from subfleet.elastic.families import FAMILIES, PRESETS, preset
for name in FAMILIES:
    assert FAMILIES[name].TYPE == name
for name in PRESETS:
    shape = {"ds_cnn": (1, 49, 10), "vit_tiny": (3, 32, 32)}.get(name, (3, 32, 32))
    shape = (9,) if name in ("bert_small", "decoder_small", "char_lstm", "rnn") else shape
    assert preset(name, input_shape=shape, class_count=7).class_count == 7
assert not FAMILIES.broken and not PRESETS.broken
assert "torch" not in sys.modules
print(len(FAMILIES), len(PRESETS))
"""


@pytest.mark.slow
def test_no_registered_family_or_network_is_broken_and_none_loads_torch() -> None:
    process = subprocess.run(
        [sys.executable, "-c", TORCH_FREE], capture_output=True, text=True, check=False, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert [int(count) for count in process.stdout.split()] == [len(FAMILIES), len(PRESETS)]
    assert len(FAMILIES) >= 12


@pytest.mark.parametrize("config", [*CONFIGS, *TOKEN_CONFIGS], ids=lambda config: config.TYPE)
def test_a_record_comes_back_from_plain_data(config: Family) -> None:
    plain = to_plain(config)
    assert plain["family"] == config.TYPE
    assert "type" not in plain
    assert from_plain(OPEN, plain) == config


@pytest.mark.parametrize(
    ("config", "foreign"),
    [
        (RESNET, {"heads": (1, 1)}),
        (RESNET, {"squeezed_widths": (1, 1)}),
        (RESNET, {"patch": 4}),
        (MLP, {"kernels": (3, 3, 3)}),
        (VIT, {"vocabulary": 3}),
        (VIT, {"group_size": 1}),
        (DECODER, {"patch": 2}),
        (LSTM, {"heads": (1, 1)}),
        (LSTM, {"scaler": True}),
        (preset("vgg11", input_shape=(3, 32, 32), class_count=10), {"learnable_steps": True}),
        (preset("ds_cnn", input_shape=(1, 49, 10), class_count=10), {"strides": (1, 2)}),
        (preset("mobilenet_v2", input_shape=(3, 32, 32), class_count=10), {"squeezed_widths": (1, 1, 1)}),
    ],
)
def test_a_family_has_no_setting_of_another(config: Family, foreign: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=f"{next(iter(foreign))} is an unknown key"):
        from_plain(OPEN, {**to_plain(config), **to_plain(foreign)})


@pytest.mark.parametrize("config", [*CONFIGS, *TOKEN_CONFIGS], ids=lambda config: config.TYPE)
def test_a_record_refuses_what_no_network_can_have(config: Family) -> None:
    sections = len(network_of(config).sections)
    for change, words in (
        ({"class_count": 0}, "class_count is 0"),
        ({"input_shape": ()}, "input_shape"),
        ({"depths": (0,) * sections}, r"depths\[0\] is 0, but must be 1 or more"),
        ({"widths": ()}, "widths is empty, but must have 1 or more"),
        ({"widths": (-4,) * sections}, r"widths\[0\] is -4, but must be 1 or more"),
        ({"norm": "batches"}, "norm is 'batches'"),
    ):
        with pytest.raises(ConfigError, match=words):
            dataclasses.replace(config, **change)


@pytest.mark.parametrize(
    "config", [RESNET, CONVOLUTIONAL["vgg"], CONVOLUTIONAL["mobilenet_v3"]], ids=lambda config: config.TYPE
)
def test_kernels_have_a_middle(config: Family) -> None:
    kernels = (3,) * (len(network_of(config).sections) - 1) + (4,)
    with pytest.raises(ConfigError, match=f"a kernel of section {len(kernels) - 1} is 4 wide, but must be odd"):
        dataclasses.replace(config, kernels=kernels)
