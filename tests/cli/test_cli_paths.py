"""`subfleet runs path`: any path of a run's supernet, as it was before fine-tuning."""

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


def kept(folder: Path, **files: Mapping[str, Tensor]) -> Path:
    """A run that is over, with these files of weights."""
    folder.mkdir(parents=True)
    write_description(folder, make_config(FedorAS()))
    for name, state in files.items():
        save_file(dict(state), folder / f"{name}.safetensors")
    return folder.parent


def said(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["runs", "path", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.mark.slow
@pytest.mark.export
def test_a_path_is_written_with_the_weights_from_before_fine_tuning(tmp_path: Path) -> None:
    state = init_state(NETWORK, 4)
    runs = kept(tmp_path / "runs" / "run", supernet=state, model=init_state(NETWORK, 5))
    asked = [
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
    code, output = said("run", *asked)
    assert code == 0
    told = json.loads(output)
    assert tuple(told["operators"].values()) == PATH
    architecture = path_architecture(NETWORK, PATH)
    module = build_module(NETWORK, architecture).eval()
    module.load_state_dict({name: state[name] for name in module.state_dict()})
    assert told["parameters"] == sum(tensor.numel() for tensor in module.state_dict().values())
    assert load_file(told["weights"]).keys() == module.state_dict().keys()
    session = ort.InferenceSession(told["files"]["onnx"])
    sample = np.random.default_rng(1).random((1, *CONFIG.input_shape), dtype=np.float32)
    (found,) = session.run(None, {session.get_inputs()[0].name: sample})
    np.testing.assert_allclose(found, module(torch.from_numpy(sample)).detach(), atol=1e-5)


def test_a_path_that_is_none_is_refused_with_what_there_is(tmp_path: Path) -> None:
    runs = kept(tmp_path / "runs" / "run", supernet=init_state(NETWORK, 4))
    code, output = said("run", "--runs", runs)
    assert code == 10
    assert "name the operator of each choice with --operator, or draw a path with --random" in output
    assert "conv1, dsconv3, identity" in output
    code, output = said("run", "--runs", runs, "--operator", "conv1")
    assert code == 10
    assert "a path has 1 operators, but the network has 2 choices" in output


def test_a_run_without_a_supernet_or_that_is_not_over_says_so(tmp_path: Path) -> None:
    runs = kept(tmp_path / "runs" / "run")
    code, output = said("run", "--runs", runs, "--random", 1)
    assert code != 0
    assert "is not over" in " ".join(output.split())
    folder = tmp_path / "runs" / "plain"
    folder.mkdir()
    write_description(folder, make_config(FedAvg()))
    code, output = said("plain", "--runs", runs, "--random", 1)
    assert code == 10
    assert "has no supernet: its model, a 'mlp', has no choices" in " ".join(output.split())
