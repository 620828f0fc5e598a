"""Hooks on parameters: a network's own changes to gradients before the optimiser's step.

A step trains its own tensors in place of the parameters, so hooks are copied to these. A hook on the gradient of a
batch may differ on the gradients of its parts, so micro-batches allow none.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from subfleet.protocol.errors import ExportError

_Hook = Callable[[Tensor], Any]


def hooks_of(part: Tensor) -> list[_Hook]:
    """Return a parameter's hooks."""
    return [*_gradient_hooks(part), *_post_hooks(part)]


def has_hooks(module: nn.Module) -> bool:
    """Return whether any parameter of a module has hooks."""
    return any(hooks_of(part) for part in module.parameters())


def check_hooks(module: nn.Module) -> None:
    """Check that no parameter has a hook, for gradients that are sums over parts of a batch.

    Raises:
        ExportError: a parameter has a hook.
    """
    for name, part in module.named_parameters():
        if hooks_of(part):
            raise ExportError(
                f"parameter {name!r} has a hook, which would be given the gradient of each micro-batch instead of "
                "their sum; set micro_batch_size = 0, or remove the hook"
            )


def copy_hooks(tensor: Tensor, parameter: Tensor, memo: dict[int, Any] | None = None) -> Tensor:
    """Copy the hooks of a parameter to a leaf.

    Args:
        tensor: the leaf.
        parameter: the parameter that the leaf replaces.
        memo: replacements for the objects that hooks are bound to, as in `copy.deepcopy`; None keeps them.
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
    """Apply the hooks that PyTorch calls once a gradient is in `grad`; return the gradients.

    Args:
        leaves: tensors in place of the parameters, by name.
        gradients: by the same names.
        parameters: the parameters with the hooks, by the same names.

    Raises:
        ExportError: a hook changes its parameter, as an optimiser inside the backward pass does, or clears the
            gradient.
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
