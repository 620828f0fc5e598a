"""A request's id says what the program is, and nothing else."""

import dataclasses
import re

import pytest
from export.export_cases import FULL_SGD, MLP, PLAIN, RESNET, largest, smallest, train_request

from subfleet.export import versions
from subfleet.export.requests import InferRequest
from subfleet.export.targets import TARGETS
from subfleet.export.versions import TARGET_NAMES, tool_versions
from subfleet.protocol.errors import MissingExtraError


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
