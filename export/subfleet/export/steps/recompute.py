"""Activation checkpointing: a block keeps only its inputs, and is computed again in the backward pass.

A block is the outermost module in an `nn.Sequential` or `nn.ModuleList` that has its own layers and is not itself such
a container of blocks: the residual blocks of a section, the layers of a transformer. A recorded network has the blocks
of its record.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from subfleet.elastic.recording.replaying import ReplayedModule
from subfleet.export.layers import LAYERS, LayerContext, LayerReplacing
from subfleet.export.steps.module_calls import call_with_state, set_constants
from subfleet.protocol.errors import ExportError

_CONTAINERS = (nn.Sequential, nn.ModuleList)
_Run = Callable[[Sequence[Tensor]], list[Tensor]]


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a module, by name.

    Raises:
        ExportError: there are none.
    """
    blocks: dict[str, nn.Module] = {}
    if isinstance(module, ReplayedModule):
        blocks = {name: module.find_layer(name) for name in module.list_blocks()}
    else:
        _collect_blocks(module, "", blocks)
    if not blocks:
        raise ExportError(
            "recompute finds no block in the network: no nn.Sequential or nn.ModuleList holds modules with layers of "
            "their own, and none adds to its input; group its layers into blocks, or leave recompute out"
        )
    return blocks


def _collect_blocks(module: nn.Module, prefix: str, blocks: dict[str, nn.Module]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, _CONTAINERS) and _is_composite(child) and not _holds_composites(child):
            blocks[path] = child
        else:
            _collect_blocks(child, f"{path}.", blocks)


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _holds_composites(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and any(_is_composite(child) for child in module.children())


@contextmanager
def recompute_blocks(module: nn.Module, context: LayerContext) -> Iterator[None]:
    """Let the blocks of a module keep no activations; results and gradients stay the same.

    It must be active until after the backward pass.

    Raises:
        ExportError: the module has no block.
    """
    with ExitStack() as stack:
        for name, block in blocks_of(module).items():
            if isinstance(module, ReplayedModule):
                module.replaced_blocks[name] = _CheckpointedForward(block, partial(module.compute_block, name), context)
                stack.callback(module.replaced_blocks.pop, name)
            else:
                block.forward = _CheckpointedForward(block, block.forward, context)
                stack.callback(block.__dict__.pop, "forward")
        yield


class _CheckpointedForward:
    """The forward of a block that keeps only its inputs."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], context: LayerContext) -> None:
        self._block = block
        self._forward = forward
        self._context = context
        self._running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if self._running or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # The step has replaced the block's own state while the whole module runs.
        state = {**dict(self._block.named_parameters()), **dict(self._block.named_buffers())}
        leaves, arguments = pytree.tree_flatten((args, kwargs))
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        results: list[tuple[pytree.TreeSpec, list[str]]] = []

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            filled = list(leaves)
            for position, tensor in zip(positions, tensors[len(state) :], strict=True):
                filled[position] = tensor
            again, named = pytree.tree_unflatten(filled, arguments)
            run_state = dict(zip(state, tensors, strict=False))
            outputs, replaced = self._run(run_state, again, named)
            flat, architecture = pytree.tree_flatten(outputs)
            results.append((architecture, list(replaced)))
            return [*flat, *replaced.values()]

        run_inputs = [*state.values(), *(leaves[position] for position in positions)]
        flat = _Recomputation.apply(run, len(state), self._context, *run_inputs)  # type: ignore[no-untyped-call]
        architecture, names = results[0]
        set_constants(self._block, dict(zip(names, flat[architecture.num_leaves :], strict=True)))
        return pytree.tree_unflatten(flat[: architecture.num_leaves], architecture)

    def _run(
        self, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the block's outputs, and the buffers that it replaced."""

        def body() -> tuple[Any, dict[str, Tensor]]:
            outputs = self._forward(*args, **kwargs)
            buffers = dict(self._block.named_buffers())
            return outputs, {name: new for name, new in buffers.items() if new is not state.get(name, new)}

        self._running = True
        try:
            with LayerReplacing(LAYERS, self._context):
                return call_with_state(self._block, state, body)
        finally:
            self._running = False


class _Recomputation(torch.autograd.Function):
    """Runs a block, and runs it again in the backward pass.

    This is not `torch.utils.checkpoint`: a runtime merges nodes that do the same to the same inputs, and would keep the
    activations after all. Here the second inputs depend on the incoming gradient, by a factor that is always 1.
    """

    @staticmethod
    def forward(ctx: Any, run: _Run, state_count: int, context: LayerContext, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.state_count, ctx.context, ctx.random_count = run, state_count, context, context.random_count
        # Before the run, which may change buffers in place.
        ctx.save_for_backward(*(tensor.clone() for tensor in tensors[:state_count]), *tensors[state_count:])
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        unit = gradients[0].reshape(-1)[:1].sum(dim=0) * 0.0 + 1.0
        again = []
        for index, (tensor, needs) in enumerate(zip(ctx.saved_tensors, needed, strict=True)):
            is_argument = index >= ctx.state_count and tensor.is_floating_point()
            again.append((tensor * unit if is_argument else tensor).detach().requires_grad_(needs))
        with torch.enable_grad(), ctx.context.repeat(ctx.random_count):
            results = ctx.run(again)
        pairs = [pair for pair in zip(results, gradients, strict=True) if pair[0].requires_grad]
        gradients_found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                [tensor for tensor, needs in zip(again, needed, strict=True) if needs],
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )
        )
        return None, None, None, *(next(gradients_found) if needs else None for needs in needed)
