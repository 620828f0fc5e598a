"""A request's id depends on everything that changes the program, and on nothing else."""

import dataclasses
import re

import pytest
from export.export_cases import FULL_SGD, MLP, PLAIN, RESNET, grow_resnet, largest, smallest, train_request

from subfleet.elastic.families import PRESETS, preset
from subfleet.export import requests, versions
from subfleet.export.requests import InferRequest, TrainRequest
from subfleet.export.targets import TARGETS
from subfleet.export.versions import TARGET_NAMES, tool_versions
from subfleet.protocol.errors import MissingExtraError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


def test_ids_are_the_same_for_the_same_program() -> None:
    request = train_request("onnx")
    renamed = dataclasses.replace(
        request, architecture=dataclasses.replace(request.architecture, name="another display name")
    )
    assert request.program_id == train_request("onnx").program_id == renamed.program_id
    assert re.fullmatch("[0-9a-f]{64}", request.program_id)


def test_ids_differ_with_everything_that_changes_the_program() -> None:
    request = train_request("onnx")
    assert request.optimiser == FULL_SGD
    infer = InferRequest(model=MLP, architecture=largest(MLP), target="onnx", weights_sha256="0" * 64)
    ids = [
        request.program_id,
        train_request("executorch").program_id,
        train_request("onnx", RESNET).program_id,
        train_request("onnx", architecture=smallest(MLP)).program_id,
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
    "bert_small": "6ac72a8fa1f15e30",
    "char_lstm": "6879fbb0347e7d80",
    "cnn_l": "23bd7e0952914e00",
    "cnn_s": "5e86b184fa566d68",
    "decoder_small": "0def9ff56e1beca5",
    "ds_cnn": "3e950d74a9601b2f",
    "efficientnet_v2_s": "df4a14c134e9b24a",
    "efficientnet_v2_tiny": "ce151d9d2819c29a",
    "mobilenet_v2": "4ed7ed19c8808baf",
    "mobilenet_v3_large": "8e9b8f50190edded",
    "mobilenet_v3_small": "8b0ec7ccc2d870fe",
    "nas_bench_201": "05e35725c125616c",
    "resnet101": "e1ff5d9e8213799d",
    "resnet152": "5b39eb2ea726c116",
    "resnet18": "bc43f21ecf131f2b",
    "resnet34": "ae4f20be313c0ca2",
    "resnet50": "f52fdde06fa4bb53",
    "rnn": "422bc74d873ad977",
    "vgg11": "ffae095506b6d510",
    "vgg13": "cf454102f274a5d3",
    "vgg14": "aba564b43914e507",
    "vgg15": "c33e8dc502974556",
    "vgg16": "11d1f8d1d66af067",
    "vgg16_wider": "067e4723cb8d8958",
    "vgg17": "7fef754bf7339f5c",
    "vgg18": "c515b40e27ba4f01",
    "vgg19": "98715ce46d773586",
    "vgg19_wider": "9300ccbc4ead1858",
    "vit_tiny": "2d40ddfd1d79cf14",
}
"""The first digits of each id, without the versions of tools."""
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
        architecture=Architecture(),
        target="onnx",
        batch_size=4,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(),
    )
    assert request.program_id.startswith(PRESET_IDS[name])


def test_a_network_whose_blocks_have_other_names_has_another_program() -> None:
    deeper = dataclasses.replace(RESNET, depths=(2, 3))
    assert deeper != grow_resnet()
    assert train_request("onnx", grow_resnet()).program_id != train_request("onnx", deeper).program_id


def test_batches_in_one_part_need_summed_gradients() -> None:
    with pytest.raises(ValueError, match="set accumulate too"):
        dataclasses.replace(train_request("onnx"), one_part=True)


def test_another_tool_makes_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    before = train_request("onnx").program_id
    monkeypatch.setattr(versions, "installed_version", lambda tool: "999")
    assert train_request("onnx").program_id != before


def test_a_missing_tool_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'subfleet\[export\]'"):
        versions.installed_version("a-package-that-is-not-there")


def test_every_target_has_its_versions_and_its_file_ending() -> None:
    assert set(TARGET_NAMES) == set(TARGETS)
    for target in TARGET_NAMES:
        assert TARGETS[target].name == target
        assert {"torch", "subfleet.export"} < set(tool_versions(target))
        request = InferRequest(model=MLP, architecture=largest(MLP), target=target, weights_sha256="0" * 64)
        assert request.file_name.startswith(request.program_id + ".")
