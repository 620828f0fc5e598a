"""Hooks on parameters: what a network's author has made of gradients, before the optimiser sees them.

A step trains tensors of its own in the place of the parameters, so that hooks are put on these, too. A hook of a batch
may do to its gradient what it does not do to those of parts of it: with micro-batches there can be none.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from subfleet.protocol.errors import ExportError

__all__ = ["apply_post_hooks", "check_hooks", "copy_hooks", "has_hooks", "hooks_of"]

_Hook = Callable[[Tensor], Any]


def hooks_of(part: Tensor) -> list[_Hook]:
    """A parameter's hooks."""
    return [*_gradient_hooks(part), *_post_hooks(part)]


def has_hooks(module: nn.Module) -> bool:
    """Whether a parameter of a module has hooks."""
    return any(hooks_of(part) for part in module.parameters())


def check_hooks(module: nn.Module) -> None:
    """Make sure that no parameter has a hook, as where gradients are sums over parts of a batch.

    Raises:
        ExportError: one has.
    """
    for name, part in module.named_parameters():
        if hooks_of(part):
            raise ExportError(
                f"parameter {name!r} has a hook, which would be given the gradient of each micro-batch instead of "
                "their sum; set micro_batch_size = 0, or remove the hook"
            )


def copy_hooks(tensor: Tensor, parameter: Tensor, memo: dict[int, Any] | None = None) -> Tensor:
    """A leaf in the place of a parameter, with the hooks of that.

    Args:
        tensor: the leaf.
        parameter: in whose place it is.
        memo: as of `copy.deepcopy`: what a copied module has in the place of what hooks are bound to; None leaves them.
    """
    for register, hooks in (
        (tensor.register_hook, _gradient_hooks(parameter)),
        (tensor.register_post_accumulate_grad_hook, _post_hooks(parameter) if memo is not None else []),
    ):
        for hook in hooks:
            register(hook if memo is None else copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call] # PyTorch's
    return tensor


def apply_post_hooks(
    leaves: Mapping[str, Tensor], gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients after the hooks that PyTorch calls once a gradient stands in `grad`.

    Args:
        leaves: in the place of the parameters, by name.
        gradients: by the same names.
        parameters: that have the hooks, by the same names.

    Raises:
        ExportError: a hook changes its parameter, as an optimiser within the backward pass does, or takes the gradient
            away.
    """
    changed = dict(gradients)
    for name in gradients:
        hooks = _post_hooks(parameters[name])
        if not hooks:
            continue
        leaf = leaves[name]
        leaf.grad, version = gradients[name], leaf._version  # noqa: SLF001 - PyTorch tells it nowhere else
        for hook in hooks:
            hook(leaf)
        gradient: Tensor | None = leaf.grad
        if gradient is None or leaf._version != version:  # noqa: SLF001
            raise ExportError(
                f"a hook of parameter {name!r} changes the parameter or clears its gradient, but a program changes "
                "parameters only by the optimiser of the run; remove the hook"
            )
        changed[name] = gradient
    return changed


def _gradient_hooks(part: Tensor) -> list[_Hook]:
    return list((part._backward_hooks or {}).values())  # noqa: SLF001 - no other way to them


def _post_hooks(part: Tensor) -> list[_Hook]:
    return list((part._post_accumulate_grad_hooks or {}).values())  # noqa: SLF001 - likewise
