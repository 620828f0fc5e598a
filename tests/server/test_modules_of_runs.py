"""A run names a PyTorch module; it is imported once, where the file is read."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from server.first_models import load_first_model
from torch import nn

from subfleet.aggregation.views import View, imitate_client
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.recording.replaying import ReplayedModule
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.serving.run_context import create_context
from subfleet.settings.named_networks import declare_network, find_client_network
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run
from subfleet.tasks.arrays_file import make_dataset

SAMPLES = make_dataset(np.random.default_rng(0).random((32, 1, 8, 8), np.float32), np.arange(32) % 10, "drawn")
_NAMED = 'module = "code_of_a_test:build"\n'
_CODE = """
from torch import nn


def build(width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def focal(outputs, labels):
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    return (1 - (-losses).exp()) ** 2 * losses


def build_with_norm():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    network.unused = nn.Linear(3, 3)
    network.forward = lambda images: network[3](network[2](network[1](network[0](images))))
    return network
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of code."""
    (tmp_path / "code_of_a_test.py").write_text(_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "code_of_a_test", raising=False)
    return tmp_path


def write(folder: Path, model: str) -> Path:
    path = folder / "run.toml"
    path.write_text(f'base = "quickstart"\n\n[model]\n{model}\n')
    return path


def test_a_module_is_the_network_of_a_run(folder: Path) -> None:
    run = read_run(
        write(folder, 'module = "code_of_a_test:build"\narguments = { width = 12 }\ninput_shape = [1, 8, 8]')
    )
    assert isinstance(run.model, Recorded)
    assert (run.model.input_shape, run.model.class_count) == ((1, 8, 8), 10)
    network = network_of(run.model)
    assert network.shapes(Architecture(axes=(("1", Prefix(size=3)),))) == {
        "1.weight": (3, 64), "1.bias": (3,), "3.weight": (10, 3), "3.bias": (10,),
    }  # fmt: skip


def test_the_file_says_what_may_be_cut(folder: Path) -> None:
    run = read_run(write(folder, _NAMED + "input_shape = [1, 8, 8]\ngranularity = 4\nblocks = []"))
    assert network_of(run.model).axes["1"].granularity == 4
    run = read_run(write(folder, _NAMED + 'input_shape = [1, 8, 8]\nkeep = ["1"]'))
    assert [axis.kind for axis in network_of(run.model).axes.values()] == ["class"]
    with pytest.raises(ConfigError, match=r"keep names 'first', but the network has \['1'\]"):
        read_run(write(folder, _NAMED + 'input_shape = [1, 8, 8]\nkeep = ["first"]'))


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_module(folder: Path) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    module(torch.randn(5, 1, 8, 8))
    unused = {"unused.weight": torch.zeros(3, 3), "unused.bias": torch.zeros(3)}
    save_file({**module.state_dict(), **unused}, folder / "trained.safetensors")
    model = 'module = "code_of_a_test:build_with_norm"\ninput_shape = [1, 8, 8]\nweights = "trained.safetensors"'
    run = read_run(write(folder, model))
    shared = load_first_model(run, folder, SAMPLES).shared
    assert list(shared) == list(network_of(run.model).tensors)
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in shared.items())
    assert shared["1.running_var"].std() > 0, "statistics are taken, too"
    (folder / "other").mkdir()
    other = replace(run, first_weights=None, name="other")
    assert not torch.equal(load_first_model(other, folder / "other", SAMPLES).shared["0.weight"], shared["0.weight"])


def test_weights_that_are_missing_are_reported(folder: Path) -> None:
    with pytest.raises(FileError, match=r"model\.weights nowhere\.safetensors cannot be read"):
        read_run(write(folder, _NAMED + 'input_shape = [1, 8, 8]\nweights = "nowhere.safetensors"'))


@pytest.mark.slow
def test_weights_of_another_network_are_refused(folder: Path) -> None:
    save_file({"1.weight": torch.zeros(8, 64)}, folder / "trained.safetensors")
    run = read_run(write(folder, _NAMED + 'input_shape = [1, 8, 8]\nweights = "trained.safetensors"'))
    with pytest.raises(ConfigError, match="do not fit the run's model"):
        load_first_model(run, folder, SAMPLES)


def test_what_is_stored_needs_no_code(folder: Path) -> None:
    run = read_run(write(folder, _NAMED + "input_shape = [1, 8, 8]"))
    (folder / "code_of_a_test.py").unlink()
    sys.modules.pop("code_of_a_test")
    again = from_plain(Run, parse_json(canonical_json(run), max_bytes=2**20))
    assert again == run
    assert network_of(again.model).parameter_count(Architecture()) == 64 * 8 + 8 + 8 * 10 + 10


def test_a_loss_belongs_to_what_is_stored(folder: Path) -> None:
    path = write(folder, _NAMED + 'input_shape = [1, 8, 8]\nloss = "code_of_a_test:focal"')
    run = read_run(path)
    (folder / "code_of_a_test.py").unlink()
    sys.modules.pop("code_of_a_test")
    again = from_plain(Run, parse_json(canonical_json(run), max_bytes=2**20))
    network = network_of(again.model)
    module = build_module(network, network.full_architecture())
    assert isinstance(module, ReplayedModule)
    assert module.own_loss is not None
    outputs, labels = torch.eye(10)[:1], torch.tensor([0])
    likelihood = outputs.softmax(1)[0, 0]
    assert module.own_loss(outputs, labels).item() == pytest.approx(float(-((1 - likelihood) ** 2) * likelihood.log()))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.objective.name='mean_squared_error'", "model.loss takes class indices as labels, but those of"),
        ("training.objective.label_smoothing=0.1", "label_smoothing is set, but model.loss computes the whole loss"),
        ("model.loss='code_of_a_test:focus'", "has no 'focus'; name one of its functions or classes"),
        ("model.loss='torch.nn.functional:cross_entropy'", "must return the loss of each label; use reduction='none'"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(folder: Path, override: str, message: str) -> None:
    path = write(folder, _NAMED + 'input_shape = [1, 8, 8]\nloss = "code_of_a_test:focal"')
    with pytest.raises(ConfigError, match=message):
        read_run(path, [override])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_NAMED, "a module needs either input_shape, or inputs if it has several"),
        (_NAMED + 'input_shape = [1, 8, 8]\nwidth = 3', "model.width"),
        (_NAMED + 'input_shape = [1, 8, 8]\narguments = 3', "arguments is 3, but must be a table"),
        (
            _NAMED + 'input_shape = [1, 8, 8]\narguments = { depth = 3 }',
            "fails: build.. got an unexpected keyword argument 'depth'",
        ),
        (_NAMED + 'input_shape = [3, 8, 8]', "the network fails in layer '1' for inputs of shape"),
        ('module = "nowhere_at_all:build"\ninput_shape = [1, 8, 8]', "module 'nowhere_at_all' cannot be imported"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(folder: Path, model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_run(write(folder, model))


def test_a_method_that_makes_blocks_wider_needs_residual_blocks(folder: Path) -> None:
    path = write(folder, 'module = "code_of_a_test:build"\ninput_shape = [1, 8, 8]')
    with pytest.raises(ConfigError, match="repeats them, but the network has no residual blocks; choose another"):
        read_run(path, ["method.type='fedtrans'"])


def save_module(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    try:
        save_file(__import__("code_of_a_test").build(1100).state_dict(), folder / "trained.safetensors")
    finally:
        sys.path.remove(str(folder))


_WIDE = _NAMED + "input_shape = [1, 8, 8]\narguments = { width = 1100 }\n"


def list_importances(order: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """By hidden unit."""
    if order == "importance":
        return tensors["1.weight"].abs().sum(1) + tensors["1.bias"].abs() + tensors["3.weight"].abs().sum(0)
    images = torch.from_numpy(SAMPLES.inputs).flatten(1)
    hidden = (images @ tensors["1.weight"].T + tensors["1.bias"]).relu()
    return hidden.mean(0) * tensors["3.weight"].abs().sum(0)


@pytest.mark.parametrize("order", ["importance", "activations"])
def test_given_weights_are_sorted_and_compute_the_same(folder: Path, order: str) -> None:
    save_module(folder)
    models = []
    for own in ("given", order):
        (folder / own).mkdir()
        run = read_run(write(folder, f'{_WIDE}weights = "trained.safetensors"\norder = "{own}"'))
        models.append(dict(load_first_model(run, folder / own, SAMPLES).shared))
    given, ordered = models
    before, after = (list_importances(order, tensors) for tensors in models)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, before.sort(descending=True).values)
    assert all(
        torch.equal(given[name].flatten().sort().values, ordered[name].flatten().sort().values) for name in given
    )


def test_a_frozen_part_begins_with_given_weights(folder: Path) -> None:
    save_module(folder)
    with pytest.raises(ConfigError, match=r"training leaves '1\.weight' as it is, but the run has no weights to begin"):
        read_run(write(folder, _WIDE + 'freeze = ["1"]'))
    run = read_run(write(folder, _WIDE + 'freeze = ["1"]\nweights = "trained.safetensors"'))
    assert isinstance(run.model, Recorded)
    assert run.model.frozen == ("1.weight", "1.bias")
    whole = create_context(run, "r").first.candidates[-1]
    assert whole.parameters == 65 * 1100 + 1101 * 10
    assert whole.weight_bytes == whole.update_bytes == 4 * 1101 * 10, "links need not carry what is frozen"
    network = create_context(run, "r").network
    client = imitate_client(network, network.full_architecture())
    view = View.of(run.roles, network, ModelState.first(init_state(network, 0)), client)
    assert view.untrained == 1101 * 10 / whole.parameters, "what is frozen is not to be trained"
    with pytest.raises(
        ConfigError, match=r"method 'fedfa' scales or maps every weight .* leaves 2 tensors as they are"
    ):
        read_run(write(folder, _WIDE + 'freeze = ["1"]\nweights = "trained.safetensors"'), ["method.type='fedfa'"])


def test_adapters_are_drawn_beside_given_weights(folder: Path) -> None:
    save_module(folder)
    lora = 'weights = "trained.safetensors"\nlora = { rank = 4, targets = ["1"], train = ["3"] }'
    run = read_run(write(folder, _WIDE + lora))
    model, trained = load_first_model(run, folder, SAMPLES).shared, load_file(folder / "trained.safetensors")
    assert all(torch.equal(model[name], tensor) for name, tensor in trained.items())
    assert model.keys() - trained.keys() == {"1.lora_down", "1.lora_up"}
    assert not model["1.lora_up"].any()
    assert model["1.lora_down"].any()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('order = "importance"', "order sorts given weights; name a file as weights"),
        ('weights = "trained.safetensors"\norder = "size"', r"first_weights\.order is 'size', but must be one of"),
        ("lora = { rank = 0 }", r"rank is 0, but must be 1 or more"),
        ('lora = { targets = ["9"] }', r"lora\.targets names '9', but the network has the linear layers \['1', '3'\]"),
        ('freeze = ["9"]', r"freeze names '9', but the network has the layers \['1', '3'\]"),
    ],
)
def test_wrong_fine_tuning_is_refused(folder: Path, model: str, message: str) -> None:
    save_module(folder)
    with pytest.raises(ConfigError, match=message):
        read_run(write(folder, _WIDE + model))


_NETWORKS = """
[networks.narrow]
module = "code_of_a_test:build"
arguments = { width = 4 }

[networks.plain]
family = "mlp"
widths = [8]
depths = [1]
"""


def test_devices_declare_modules_by_name(folder: Path) -> None:
    path = write(folder, _NAMED + "input_shape = [1, 8, 8]")
    path.write_text(path.read_text() + _NETWORKS)
    run = read_run(
        path, ["fleet.devices=[{ id = 'ada', log = 'laptop', network = { name = 'narrow' } }]", "min_clients=1"]
    )
    (device,) = run.fleet.devices
    assert device.network == run.networks["narrow"]
    text = declare_network(run.networks["narrow"], run.networks)
    assert text == '{"name":"narrow"}'
    assert find_client_network(text, run.model, run.networks) == run.networks["narrow"]
    plain = declare_network(replace(run.networks["plain"], group_size=2), run.networks)
    assert find_client_network(plain, run.model, run.networks).TYPE == "mlp", "by its settings"
    assert from_plain(Run, parse_json(canonical_json(run), max_bytes=2**20), "run") == run


def test_an_unknown_name_is_refused(folder: Path) -> None:
    path = write(folder, _NAMED + "input_shape = [1, 8, 8]")
    path.write_text(path.read_text() + _NETWORKS)
    with pytest.raises(ConfigError, match=r"network has the name 'wide', but the run has the networks \['narrow', 'pl"):
        read_run(path, ["fleet.devices=[{ id = 'ada', network = { name = 'wide' } }]", "min_clients=1"])


def test_what_a_device_declares_runs_no_code(folder: Path) -> None:
    """Neither code that it names, nor the calls of a record that it sends."""
    path = write(folder, _NAMED + "input_shape = [1, 8, 8]\narguments = { width = 2 }")
    run = read_run(path)
    sys.modules.pop("code_of_a_test")
    for text in ('{"module":"code_of_a_test:build","input_shape":[1,8,8]}', '{"name":"narrow"}'):
        with pytest.raises(ConfigError):
            find_client_network(text, run.model, run.networks)
    assert "code_of_a_test" not in sys.modules
    with pytest.raises(ConfigError, match="is a recorded module, but these are declared by the name"):
        find_client_network(canonical_json(run.model).decode(), run.model, run.networks)
