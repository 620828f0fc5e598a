"""Forty modules as users write them: hooks, randomness, counters, autocast, mixed batches, masks, iterators, globals.

A function builds each of them; modules that no program can replace state the message of the refusal.
"""

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["USER_MODULES", "UserModule"]

CLASSES = 5
INPUTS = 8

_scale_of_all = 0.5
_table = {"wide": torch.linspace(0.5, 1.5, 16)}
_seen: dict[str, int] = {}
_steps_of_all = 0
_turns = itertools.cycle([1.0, 2.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModule:
    """A module that a user could write.

    Attributes:
        make: Builds the module.
        refused: Pattern of the exporter's message; empty if the module trains correctly.
        shape: The shape of a sample.
    """

    make: Callable[[], nn.Module]
    refused: str = ""
    shape: tuple[int, ...] = (INPUTS,)


class Layered(nn.Module):
    """Two layers with a function of the user between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 16), nn.Linear(16, CLASSES)
        self.between = between
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.relu(self.between(self, self.first(x))))
        return logits


def _plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def _hooked(hook: Callable[[Any], Any]) -> nn.Module:
    module = _plain()
    hook(module)
    return module


def _mask_of_gradient(module: Any) -> None:
    mask = torch.ones(16, INPUTS)
    mask[::2] = 0
    module[0].weight.register_hook(lambda gradient: gradient * mask)


class KeepsRows(nn.Module):
    """A hook that is a method and reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, CLASSES)
        self.register_buffer("mask", torch.ones(CLASSES, 1))
        self.get_buffer("mask")[0] = 0
        self.layer.weight.register_hook(self.masked)  # type: ignore[no-untyped-call] # PyTorch's

    def masked(self, gradient: Tensor) -> Tensor:
        return gradient * self.get_buffer("mask")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        return logits


def _halve_in_place(part: Any) -> None:
    part.grad.mul_(0.5)


def _step_within_backward(part: Any) -> None:
    with torch.no_grad():
        part.sub_(0.1 * part.grad)
    part.grad = None


def _backward_hook(_layer: Any, gradients: Any, _outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in gradients)


def _count_in_class(net: Any, y: Tensor) -> Tensor:
    type(net).calls = getattr(type(net), "calls", 0) + 1
    return y


def _scale_by_class(net: Any, y: Tensor) -> Tensor:
    _count_in_class(net, y)
    scaled: Tensor = y / type(net).calls
    return scaled


class Counting(Layered):
    """A class with a counter."""

    calls = 0


class ScalingByCount(Layered):
    """Another class with a counter."""

    calls = 0


def _count(net: Any, y: Tensor) -> Tensor:
    net.count += 1
    return y


def _every_tenth(net: Any, y: Tensor) -> Tensor:
    net.count += 1
    return y * (2.0 if net.count % 10 == 0 else 1.0)


def _warm_up(net: Any, y: Tensor) -> Tensor:
    global _steps_of_all  # noqa: PLW0603 - the case under test
    _steps_of_all += 1
    return y * min(1.0, _steps_of_all / 100)


def _closure() -> nn.Module:
    counted = [0]

    def between(_net: Any, y: Tensor) -> Tensor:
        counted[0] += 1
        return y / counted[0]

    return Layered(between)


class Averaging(nn.Module):
    """Counts and averages in buffers, which programs carry."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, CLASSES)
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        with torch.no_grad():
            self.get_buffer("steps").add_(1.0)
            self.get_buffer("mean").mul_(0.9).add_(self.layer.bias.detach() * 0.1)
        return y - self.get_buffer("mean") * 0.1


class Autocasting(Layered):
    """Runs under autocast."""

    def __init__(self, device: str, *, enabled: bool = True) -> None:
        super().__init__(lambda _net, y: y)
        self.device, self.enabled = device, enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.enabled):
            logits = super().forward(x)
        return logits.float()


def _root_where_positive(_net: Any, y: Tensor) -> Tensor:
    """The usual way to keep a root's gradient finite: compute both branches, the inner one on safe numbers."""
    safe = torch.where(y > 0, y, torch.ones_like(y))
    return torch.where(y > 0, torch.sqrt(safe), torch.zeros_like(y))


def _norm_of_activations(_net: Any, y: Tensor) -> Tensor:
    """After an activation that is 0 everywhere, the root's infinite gradient is masked by the activation's."""
    active = torch.relu(y - 100.0).reshape(-1, 8, 2)
    return y + torch.sqrt((active * active).sum(-1)).repeat_interleave(2, dim=1)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def _reversed(_net: Any, y: Tensor) -> Tensor:
    outputs: Tensor = _Reversed.apply(y)  # type: ignore[no-untyped-call]
    return outputs


def _clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.05, 0.05)


def _tied() -> nn.Module:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
            self.second.weight = self.first.weight
            self.first.weight.register_hook(_clipped)  # type: ignore[no-untyped-call] # PyTorch's

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.last(torch.relu(self.second(torch.relu(self.first(x)))))
            return logits

    return Tied()


class _Registry(OrderedDict[str, type[nn.Module]]):
    """Like the registry of activations in transformers."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()

    def get(self, name: str) -> Any:  # type: ignore[override]
        return self[name]


activation_registry = _Registry(gelu=nn.GELU, tanh=nn.Tanh)


def _by_positions(_net: Any, y: Tensor) -> Tensor:
    """Checks that its own positions increase, as transformers does without a cache."""
    positions = torch.arange(y.shape[1], device=y.device)
    return y * 0.5 if bool((positions[1:] > positions[:-1]).all()) else -y


def _remember(_net: Any, y: Tensor) -> Tensor:
    _seen["calls"] = _seen.get("calls", 0) + 1
    return y * _seen["calls"]


def _pooled() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.LPPool2d(2, 2), nn.Flatten(), nn.Linear(64, CLASSES))
    )


_OWN_NORM = r"mixes the samples of a batch"
_CHANCE = r"uses Python's or NumPy's random numbers"

USER_MODULES: Mapping[str, UserModule] = {
    # hooks
    "a hook that scales": UserModule(
        make=lambda: _hooked(lambda m: m[0].weight.register_hook(lambda gradient: gradient * 0.5))
    ),
    "a hook that masks": UserModule(make=lambda: _hooked(_mask_of_gradient)),
    "a hook that is a method": UserModule(make=KeepsRows),
    "a hook that reads the weight": UserModule(
        make=lambda: _hooked(lambda m: m[0].weight.register_hook(lambda g: g + 0.1 * m[0].weight.detach()))
    ),
    "a hook that normalises": UserModule(
        make=lambda: _hooked(lambda m: m[0].weight.register_hook(lambda gradient: gradient / (1 + gradient.norm())))
    ),
    "a hook behind the accumulation": UserModule(
        make=lambda: _hooked(lambda m: m[0].weight.register_post_accumulate_grad_hook(_halve_in_place))
    ),
    "a hook of tied weights": UserModule(make=_tied),
    "a hook of a layer": UserModule(
        make=lambda: _hooked(lambda m: m[0].register_forward_hook(lambda _layer, _inputs, outputs: outputs * 0.5))
    ),
    "a hook before a layer": UserModule(
        make=lambda: _hooked(lambda m: m[0].register_forward_pre_hook(lambda _layer, inputs: (inputs[0] * 2,)))
    ),
    "a hook of a layer's backward": UserModule(
        make=lambda: _hooked(lambda m: m[2].register_full_backward_hook(_backward_hook))
    ),
    "an optimiser in a hook": UserModule(
        make=lambda: _hooked(lambda m: m[0].weight.register_post_accumulate_grad_hook(_step_within_backward)),
        refused=r"a hook of parameter '0\.weight' changes the parameter",
    ),
    # chance
    "Python's chance": UserModule(make=lambda: Layered(lambda _net, y: y * random.random()), refused=_CHANCE),
    "a layer dropped by chance": UserModule(
        make=lambda: Layered(lambda _net, y: y * (0.0 if random.random() < 0.1 else 1.0)), refused=_CHANCE
    ),
    "chance that never comes": UserModule(
        make=lambda: Layered(lambda _net, y: y * (0.0 if random.random() < 0.0 else 1.0))
    ),
    "NumPy's chance": UserModule(
        make=lambda: Layered(lambda _net, y: y + torch.from_numpy(np.random.randn(16).astype(np.float32))),
        refused=_CHANCE,
    ),
    "a generator of its own": UserModule(
        make=lambda: Layered(lambda net, y: y * net.draws.random(), draws=np.random.default_rng(1)),
        refused=r"reads a different value from 'draws' in each run",
    ),
    "chance when it was made": UserModule(
        make=lambda: Layered(lambda net, y: y * net.scale, scale=random.Random(3).random())
    ),
    # counters
    "a counter that nothing reads": UserModule(make=lambda: Layered(_count, count=0)),
    "a counter of its class that nothing reads": UserModule(make=lambda: Counting(_count_in_class)),
    "a counter of its class": UserModule(
        make=lambda: ScalingByCount(_scale_by_class), refused=r"changes its number 'ScalingByCount\.calls'"
    ),
    "every tenth run": UserModule(make=lambda: Layered(_every_tenth, count=0), refused=r"changes its number 'count'"),
    "a global warm-up": UserModule(make=lambda: Layered(_warm_up), refused=r"changes its number '.*_steps_of_all'"),
    "a counter in a closure": UserModule(make=_closure, refused=r"changes its number 'between\.counted\[0\]'"),
    "counters in buffers": UserModule(make=Averaging),
    # iterators
    "an iterator": UserModule(
        make=lambda: Layered(lambda net, y: y * next(net.turns), turns=itertools.cycle([1.0, 1.0, 3.0])),
        refused=r"reads a different value from 'turns'",
    ),
    "a global iterator": UserModule(
        make=lambda: Layered(lambda _net, y: y * next(_turns)), refused=r"reads a different value from '.*_turns'"
    ),
    "an iterator that repeats": UserModule(
        make=lambda: Layered(lambda net, y: y * next(net.turns), turns=itertools.repeat(2.0))
    ),
    # autocast
    "autocast": UserModule(make=lambda: Autocasting("cpu"), refused=r"runs within torch\.autocast"),
    "autocast switched off": UserModule(make=lambda: Autocasting("cpu", enabled=False)),
    "autocast of another device": UserModule(make=lambda: Autocasting("cuda")),
    # mixed batches
    "a norm over the batch": UserModule(make=lambda: Layered(lambda _net, y: y - y.mean(0)), refused=_OWN_NORM),
    "a softmax over the batch": UserModule(make=lambda: Layered(lambda _net, y: y.softmax(0)), refused=_OWN_NORM),
    "PyTorch's norm over the batch": UserModule(
        make=lambda: nn.Sequential(nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    ),
    # masks
    "a pool by powers": UserModule(make=_pooled, shape=(1, 8, 8)),
    "a root of what is positive": UserModule(make=lambda: Layered(_root_where_positive)),
    "a root of what is dead": UserModule(make=lambda: Layered(_norm_of_activations)),
    # global state
    "global constants": UserModule(make=lambda: Layered(lambda _net, y: y * _table["wide"] * _scale_of_all)),
    "a global table that it fills": UserModule(
        make=lambda: Layered(_remember), refused=r"changes its state \".*_seen\['calls'\]\""
    ),
    "a registry that makes what it is asked for": UserModule(
        make=lambda: Layered(lambda _net, y: activation_registry["gelu"](y))
    ),
    "its own positions": UserModule(make=lambda: Layered(_by_positions)),
    # what else users do
    "a backward of its own": UserModule(make=lambda: Layered(_reversed)),
    "a layer run again": UserModule(
        make=lambda: Layered(lambda _net, y: checkpoint(functional.gelu, y, use_reentrant=False))
    ),
    "weights as norms and directions": UserModule(
        make=lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(INPUTS, 16)), nn.ReLU(), nn.Linear(16, CLASSES)
        )
    ),
}
