"""A request's id says what the program is, and nothing else."""

import dataclasses
import re

import pytest
from export.export_cases import FULL_SGD, GROWN_RESNET, MLP, PLAIN, RESNET, largest, smallest, train_request

from subfleet.elastic.families import PRESETS, preset
from subfleet.export import requests, versions
from subfleet.export.requests import InferRequest, TrainRequest
from subfleet.export.targets import TARGETS
from subfleet.export.versions import TARGET_NAMES, tool_versions
from subfleet.protocol.errors import MissingExtraError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


def test_ids_are_the_same_for_the_same_program() -> None:
    request = train_request("onnx")
    renamed = dataclasses.replace(request, spec=dataclasses.replace(request.spec, name="another display name"))
    assert request.program_id == train_request("onnx").program_id == renamed.program_id
    assert re.fullmatch("[0-9a-f]{64}", request.program_id)


def test_ids_differ_with_everything_that_changes_the_program() -> None:
    request = train_request("onnx")
    assert request.optimiser == FULL_SGD
    infer = InferRequest(model=MLP, spec=largest(MLP), target="onnx", weights_sha256="0" * 64)
    ids = [
        request.program_id,
        train_request("executorch").program_id,
        train_request("onnx", RESNET).program_id,
        train_request("onnx", spec=smallest(MLP)).program_id,
        train_request("onnx", batch_size=5).program_id,
        dataclasses.replace(request, optimiser=PLAIN).program_id,
        dataclasses.replace(request, accumulate=True).program_id,
        dataclasses.replace(request, accumulate=True, one_part=True).program_id,
        dataclasses.replace(request, recompute=True).program_id,
        dataclasses.replace(request, student=smallest(MLP)).program_id,
        dataclasses.replace(request, student=largest(MLP)).program_id,
        infer.program_id,
        dataclasses.replace(infer, weights_sha256="1" * 64).program_id,
    ]
    assert len(set(ids)) == len(ids)


PRESET_IDS = {
    "bert_small": "77cd01e171e556c9",
    "char_lstm": "0f0303dd29ca6642",
    "cnn_l": "175feffb03b0eff6",
    "cnn_s": "0992619de610cb46",
    "decoder_small": "9db7eb6f1e807666",
    "ds_cnn": "ef836ef9bf9c2ca5",
    "efficientnet_v2_s": "1cde58b2c9fb0b90",
    "efficientnet_v2_tiny": "744cf7bd7209f683",
    "mobilenet_v2": "252e6482205fdeb0",
    "mobilenet_v3_large": "278a20e5de524c13",
    "mobilenet_v3_small": "e428b6eafeff94e3",
    "nas_bench_201": "64146ca41e35d1e0",
    "resnet101": "e134b8b69425823f",
    "resnet152": "7d05983e67b313fd",
    "resnet18": "829e51ff673d24b3",
    "resnet34": "295a8b9324a7e65c",
    "resnet50": "f91649a132854729",
    "rnn": "80f66769d3aac47e",
    "vgg11": "00de9ea068b82fed",
    "vgg13": "6092f2d296bef213",
    "vgg14": "97a9126ad696b5d7",
    "vgg15": "1a9fae9e8ad9f3ea",
    "vgg16": "9085c6d4f373938a",
    "vgg16_wider": "b07d03588055ce36",
    "vgg17": "93bfb80e631c5674",
    "vgg18": "40cbc7ae7c57ec18",
    "vgg19": "16628abf88619273",
    "vgg19_wider": "e500cac0091d9304",
    "vit_tiny": "a2af3e46694bf9b8",
}
"""The first digits of each, without the versions of tools, as they were before blocks had numbers."""
SHAPES = {
    "cnn_s": (1, 49, 10),
    "ds_cnn": (1, 49, 10),
    **dict.fromkeys(("bert_small", "char_lstm", "decoder_small", "rnn"), (9,)),
}


@pytest.mark.parametrize("name", PRESETS)
def test_ids_of_published_networks_programs_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "tool_versions", lambda target: {})
    request = TrainRequest(
        model=preset(name, input_shape=SHAPES.get(name, (3, 32, 32)), class_count=10),
        spec=SubnetSpec(),
        target="onnx",
        batch_size=4,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(),
    )
    assert request.program_id.startswith(PRESET_IDS[name])


def test_a_network_whose_blocks_are_numbered_otherwise_has_another_program() -> None:
    deeper = dataclasses.replace(RESNET, depths=(2, 3))
    assert deeper != GROWN_RESNET
    assert train_request("onnx", GROWN_RESNET).program_id != train_request("onnx", deeper).program_id


def test_batches_in_one_part_are_those_whose_gradients_are_summed() -> None:
    with pytest.raises(ValueError, match="set accumulate, too"):
        dataclasses.replace(train_request("onnx"), one_part=True)


def test_another_tool_makes_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    before = train_request("onnx").program_id
    monkeypatch.setattr(versions, "_installed", lambda tool: "999")
    assert train_request("onnx").program_id != before


def test_a_missing_tool_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'subfleet\[export\]'"):
        versions._installed("a-package-that-is-not-there")


def test_every_target_has_its_versions_and_its_file_ending() -> None:
    assert set(TARGET_NAMES) == set(TARGETS)
    for target in TARGET_NAMES:
        assert TARGETS[target].name == target
        assert {"torch", "subfleet.export"} < set(tool_versions(target))
        request = InferRequest(model=MLP, spec=largest(MLP), target=target, weights_sha256="0" * 64)
        assert request.file_name.startswith(request.program_id + ".")
