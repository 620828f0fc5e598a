"""What cannot be recorded is refused with the layer and a remedy, and damaged records with a sentence."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from subfleet.elastic.recording.loading import make_module, record_network
from subfleet.elastic.recording.record import pack_record, unpack_record
from subfleet.elastic.recording.recorder import record_module
from subfleet.elastic.recording.replaying import ReplayedModule
from subfleet.protocol.errors import ConfigError


class Computed(nn.Module):
    """A layer, and something between it and the head."""

    def __init__(self, between: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.between = between

    def forward(self, inputs: Tensor) -> object:
        between = self.between(self.first(inputs))
        return self.head(between) if isinstance(between, Tensor) else between


DRAWN = iter([torch.rand(6) for _ in range(100)])
LARGE = torch.zeros(70_000)


def branch(hidden: Tensor) -> Tensor:
    return torch.relu(hidden) if hidden.sum() > 0 else hidden


def count_samples(hidden: Tensor) -> Tensor:
    return torch.relu(hidden) if len(hidden) > 4 else torch.tanh(hidden)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a branch on data": (branch, "layer '' turns a tensor that depends on the inputs into a Python number"),
    "a branch on the batch": (count_samples, "layer '' computes differently for different inputs or batch sizes"),
    "a number of the batch": (lambda hidden: hidden / (1 + len(hidden)), "layer '' computes differently"),
    "another constant each time": (
        lambda hidden: hidden + next(DRAWN),
        "a tensor in training that is neither a parameter nor a buffer of it, and has other values",
    ),
    "a dictionary": (lambda hidden: {"scores": hidden}, "the network returns dict, but must return a tensor of logits"),
    "a number": (lambda hidden: hidden.mean(), "the network fails in layer 'head' for inputs of shape"),
    "a large constant": (lambda hidden: hidden + LARGE[:6], r"uses a tensor of shape \(70000,\) that is no parameter"),
    "an error": (lambda hidden: functional.linear(hidden, LARGE), "the network fails in layer '' for inputs of shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    between, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        record_network(Computed(between), (4,))


def test_lazy_layers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fails for inputs of shape \(3, 4\), from which its lazy layers take their"):
        record_network(nn.Sequential(nn.LazyConv2d(6, 3), nn.Flatten()), (4,))


def test_numbers_of_constants_may_decide() -> None:
    record = record_module(Computed(lambda hidden: hidden * 2 if torch.zeros(3).sum() == 0 else hidden), (4,))
    assert [call[0] for call in record.training.calls if "mul" in call[0]] == ["torch.Tensor.mul"]


def test_a_function_that_is_not_pytorchs_mathematics_is_not_called() -> None:
    record = record_module(Computed(torch.relu), (4,))
    record.training.calls[0][0] = "torch.load"
    sizes = {axis.name: axis.size for axis in record.axes}
    module = ReplayedModule(unpack_record(pack_record(record)), sizes, frozenset())
    with pytest.raises(ConfigError, match=r"calls torch\.load, which a recorded network cannot call"):
        module(torch.zeros(2, 4))


def test_a_type_that_is_not_pytorchs_is_refused() -> None:
    record = record_module(Computed(lambda hidden: hidden.to(torch.float32)), (4,))
    record.training.calls[1][1][1] = {"dtype": "load"}
    module = ReplayedModule(record, {axis.name: axis.size for axis in record.axes}, frozenset())
    with pytest.raises(ConfigError, match="has the type 'load', which is none of PyTorch's"):
        module(torch.zeros(2, 4))


@pytest.mark.parametrize("lines", [("",), ("not base 85 \x7f",), ()])
def test_a_damaged_record_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="a recorded network is damaged"):
        unpack_record(lines)


NAMED = {
    "no colon": ("mine", "module is 'mine', but must be like 'package.file:function'"),
    "no module": ("nowhere_at_all:build", "module 'nowhere_at_all' cannot be imported .ModuleNotFoundError"),
    "no function": ("mine:other", "module 'mine' has no 'other'; name one of its functions or classes"),
    "no module of PyTorch": ("mine:number", "mine:number returns int, but must return a torch.nn.Module"),
    "a failing function": ("mine:fail", r"mine:fail\(...\) with the arguments {} fails: no such width"),
    "a value": ("mine:VALUE", "'mine:VALUE' is no function or class"),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_name_that_gives_no_network_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "VALUE = 3\n\n\ndef number():\n    return 3\n\n\ndef fail():\n    raise ValueError('no such width')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    name, message = NAMED[case]
    with pytest.raises(ConfigError, match=message):
        make_module(name, {})
