"""The very file that a device trains with also runs in a browser: Chromium with onnxruntime-web gives the same step."""

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
        model, architecture = CASES[name]
        request = train_request("onnx", model, architecture=architecture)
        step, body = step_of(request), bytes(program_of(request).body)
        example = step.example(torch.Generator().manual_seed(5))
        fed = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
        place = name.replace(" ", "-")
        jobs[place] = BrowserJob(body=body, inputs={key: tensor.numpy() for key, tensor in fed.items()})
        results = find_target("onnx").run(body, fed)
        expected[place] = {value.name: tensor.numpy() for value, tensor in zip(step.outputs, results, strict=True)}
    # A file that is no program is an error of the page's session, not a hang.
    jobs["broken"] = BrowserJob(body=b"no program", inputs={})
    answers = run_in_browser(jobs, tmp_path)
    assert "error" in answers.pop("broken")
    assert answers.keys() == expected.keys()
    for name, outputs in expected.items():
        got = answers[name]["outputs"]
        assert got.keys() == outputs.keys()
        for key, array in outputs.items():
            np.testing.assert_allclose(np.reshape(got[key], array.shape), array, atol=1e-5, rtol=1e-5)
