"""`subfleet runs path`: any path of a run's supernet, with the weights before fine-tuning."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.supernets import path_architecture
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.fedoras import FedorAS
from subfleet.settings.run_folder import write_description
from subfleet.testing.rounds import SUPERNET as CONFIG
from subfleet.testing.rounds import make_config

NETWORK = network_of(CONFIG)
PATH = ("dsconv3", "conv1")


def write_run(folder: Path, **files: Mapping[str, Tensor]) -> Path:
    """Write a finished run with these files of weights."""
    folder.mkdir(parents=True)
    write_description(folder, make_config(FedorAS()))
    for name, state in files.items():
        save_file(dict(state), folder / f"{name}.safetensors")
    return folder.parent


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["runs", "path", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.slow
@pytest.mark.export
def test_a_path_is_written_with_the_weights_from_before_fine_tuning(tmp_path: Path) -> None:
    state = init_state(NETWORK, 4)
    runs = write_run(tmp_path / "runs" / "run", supernet=state, model=init_state(NETWORK, 5))
    options = [
        "--runs",
        runs,
        "--operator",
        PATH[0],
        "--operator",
        PATH[1],
        "--target",
        "onnx",
        "--out",
        tmp_path,
        "--json",
    ]
    code, output = invoke("run", *options)
    assert code == 0
    report = json.loads(output)
    assert tuple(report["operators"].values()) == PATH
    architecture = path_architecture(NETWORK, PATH)
    module = build_module(NETWORK, architecture).eval()
    module.load_state_dict({name: state[name] for name in module.state_dict()})
    assert report["parameters"] == sum(tensor.numel() for tensor in module.state_dict().values())
    assert load_file(report["weights"]).keys() == module.state_dict().keys()
    session = ort.InferenceSession(report["files"]["onnx"])
    sample = np.random.default_rng(1).random((1, *CONFIG.input_shape), dtype=np.float32)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: sample})
    np.testing.assert_allclose(outputs, module(torch.from_numpy(sample)).detach(), atol=1e-5)


def test_an_invalid_path_is_refused_with_the_valid_operators(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "runs" / "run", supernet=init_state(NETWORK, 4))
    code, output = invoke("run", "--runs", runs)
    assert code == 10
    assert "name the operator of each choice with --operator, or draw a path with --random" in output
    assert "conv1, dsconv3, identity" in output
    code, output = invoke("run", "--runs", runs, "--operator", "conv1")
    assert code == 10
    assert "a path has 1 operators, but the network has 2 choices" in output


def test_a_run_without_a_supernet_or_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "runs" / "run")
    code, output = invoke("run", "--runs", runs, "--random", 1)
    assert code != 0
    assert "is not finished" in " ".join(output.split())
    folder = tmp_path / "runs" / "plain"
    folder.mkdir()
    write_description(folder, make_config(FedAvg()))
    code, output = invoke("plain", "--runs", runs, "--random", 1)
    assert code == 10
    assert "has no supernet: its model, a 'mlp', has no choices" in " ".join(output.split())
