"""Finds the layer that keeps a network from being trained on a target, with the reason and the remedy.

It only runs after an export has failed: each layer is then exported on its own, as a network.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.export.targets import find_target
from subfleet.export.tools import as_export_errors
from subfleet.export.tracing import trace
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

_OBJECTIVE = ObjectiveSettings(name="mean_squared_error")
_OPTIMISER = OptimiserSettings(momentum=0.0)
_NETWORK = "the network "
_ALONE = "layer 'layer'"
"""The name of an isolated layer in error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A layer that a target cannot train.

    Attributes:
        layer: its name in the network; empty for the network itself.
        kind: its class.
        reason: what is wrong.
        remedy: what to do.
    """

    layer: str
    kind: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        subject = f"layer {self.layer!r} ({self.kind})" if self.layer else f"the network ({self.kind})"
        reason = self.reason
        if reason.startswith(_NETWORK):
            reason = f"it {reason.removeprefix(_NETWORK)}"
        return f"{subject} cannot be exported for training: {reason}; {self.remedy}"


_LayerCall = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a layer's first call, by position and by name."""


class _IsolatedLayer(nn.Module):
    """A layer as a network: its first tensor argument is the batch, its other tensors are parameters.

    Another parameter scales input and output, so that every layer has a backward, also to its input.
    """

    def __init__(self, layer: nn.Module, call: _LayerCall) -> None:
        super().__init__()
        self.layer = layer
        leaves, self._tree = pytree.tree_flatten(call)
        self._first = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._leaves = leaves
        self.scale = nn.Parameter(torch.ones(()))
        self.given = nn.ParameterDict(
            {
                str(index): nn.Parameter(leaf.detach().clone())
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and index != self._first
            }
        )

    @property
    def batch(self) -> Tensor:
        batch: Tensor = self._leaves[self._first]
        return batch

    def forward(self, batch: Tensor) -> Tensor:
        """Return the sum of all outputs of the layer as the only logit of each sample."""
        leaves = [self.given.get(str(index), leaf) for index, leaf in enumerate(self._leaves)]
        leaves[self._first] = batch * self.scale if batch.is_floating_point() else batch
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        outputs = [leaf for leaf in pytree.tree_leaves(self.layer(*args, **kwargs)) if isinstance(leaf, Tensor)]
        total = torch.stack([output.sum() for output in outputs if output.is_floating_point()]).sum()
        return (total * self.scale).reshape(1, 1).expand(batch.shape[0], 1)


def find_obstacles(module: nn.Module, sample: SampleSpec, *, target: str, batch_size: int) -> tuple[Obstacle, ...]:
    """Find the innermost layers that a target cannot train, each cause once.

    Args:
        module: the network; it is not changed.
        sample: the input of one sample.
        target: a name in `subfleet.export.targets.TARGETS`.
        batch_size: samples of one step.

    Returns:
        Nothing if every layer can be trained on its own.
    """
    network = copy.deepcopy(module)
    calls = _record_calls(network, sample, batch_size)
    by_cause: dict[tuple[str, str], Obstacle] = {}
    for obstacle in _search("", network, calls, target):
        by_cause.setdefault((obstacle.kind, obstacle.reason), obstacle)
    return tuple(by_cause.values())


def explain_failure(
    error: ExportError, module: nn.Module, sample: SampleSpec, *, target: str, batch_size: int
) -> ExportError:
    """Return the error of a failed export with the layer that caused it, if that can be found."""
    try:
        causes = find_obstacles(module, sample, target=target, batch_size=batch_size)
    except Exception:  # noqa: BLE001 - an explanation must not hide the error
        return error
    return ExportError(" Also: ".join(str(obstacle) for obstacle in causes)) if causes else error


def _record_calls(network: nn.Module, sample: SampleSpec, batch_size: int) -> dict[str, list[_LayerCall]]:
    """Return the first call of every layer that runs in plain PyTorch, up to the first error.

    A layer of a recorded network is called for each function that it calls.
    """
    calls: dict[str, list[_LayerCall]] = {}
    hooks = [
        layer.register_forward_pre_hook(partial(_record, calls, name), with_kwargs=True)
        for name, layer in network.named_modules()
    ]
    value = sample.value(batch_size)
    batch = torch.zeros(value.shape, dtype=torch.int64 if value.dtype == "I64" else torch.float32)
    try:
        with torch.no_grad():
            network(batch)
    except Exception:  # noqa: BLE001 - whatever a layer raises, it is in `calls`
        return calls
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _record(
    calls: dict[str, list[_LayerCall]], name: str, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if name not in calls or callable(next(iter(args), None)):
        calls.setdefault(name, []).append((args, kwargs))


def _search(name: str, module: nn.Module, calls: Mapping[str, Sequence[_LayerCall]], target: str) -> Sequence[Obstacle]:
    kind, error = type(module).__name__, None
    for args, kwargs in calls.get(name, ()):
        error = _try_alone(module, (args, kwargs), target)
        if error is not None:
            kind = getattr(next(iter(args), None), "__name__", kind)
            break
    if name in calls and error is None:
        return ()
    # A list of layers is not called itself; its layers are.
    inner = [
        obstacle
        for child, layer in module.named_children()
        for obstacle in _search(f"{name}.{child}" if name else child, layer, calls, target)
    ]
    if inner or error is None:
        return inner
    reason, _, remedy = str(error).rpartition("; ")
    reason = (reason or remedy).replace(_ALONE, "it").replace("'layer.", "'")
    return [Obstacle(layer=name, kind=kind, reason=reason, remedy=remedy)]


def _probe_step(alone: _IsolatedLayer) -> Step:
    batch = alone.batch
    integers = not batch.is_floating_point()
    sample = SampleSpec(
        shape=tuple(batch.shape[1:]), dtype="I64" if integers else "F32", limit=int(batch.max()) + 1 if integers else 0
    )
    return training_step(alone, sample, batch_size=batch.shape[0], objective=_OBJECTIVE, optimiser=_OPTIMISER)


def _try_alone(layer: nn.Module, call: _LayerCall, target: str) -> ExportError | None:
    """Return the error of an isolated layer; None if it can be trained, or cannot be tried on its own."""
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(call)):
        return None
    writer = find_target(target)
    try:
        step = _probe_step(_IsolatedLayer(layer, call))
        with as_export_errors():
            writer.write_training(trace(step, writer.lowerings), step)
    except ExportError as error:
        return error
    except Exception:  # noqa: BLE001 - it cannot be tried on its own, but its parent can
        return None
    return None
