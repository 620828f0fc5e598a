"""The program of a device also runs in a browser: Chromium with onnxruntime-web computes the same step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from export.browser import BrowserJob, missing, run_in_browser
from export.export_cases import CASES, step_of, train_request
from shared_programs import program_of

from subfleet.export.targets import find_target

pytestmark = [
    pytest.mark.export,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there"),
]


def test_a_browser_gives_the_same_step(tmp_path: Path) -> None:
    jobs, expected = {}, {}
    for name in ("resnet smallest", "mlp scattered"):
        model, architecture = CASES[name]()
        request = train_request("onnx", model, architecture=architecture)
        step, body = step_of(request), bytes(program_of(request).body)
        example = step.example(torch.Generator().manual_seed(5))
        inputs = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
        job = name.replace(" ", "-")
        jobs[job] = BrowserJob(body=body, inputs={key: tensor.numpy() for key, tensor in inputs.items()})
        results = find_target("onnx").run(body, inputs)
        expected[job] = {value.name: tensor.numpy() for value, tensor in zip(step.outputs, results, strict=True)}
    # An invalid program is an error of the page's session, not a hang.
    jobs["broken"] = BrowserJob(body=b"no program", inputs={})
    answers = run_in_browser(jobs, tmp_path)
    assert "error" in answers.pop("broken")
    assert answers.keys() == expected.keys()
    for name, outputs in expected.items():
        actual = answers[name]["outputs"]
        assert actual.keys() == outputs.keys()
        for key, array in outputs.items():
            np.testing.assert_allclose(np.reshape(actual[key], array.shape), array, atol=1e-5, rtol=1e-5)
