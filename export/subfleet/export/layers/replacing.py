"""Replaces calls of PyTorch's functions while a module runs, as a step needs its layers.

Modules stay plain PyTorch. While a step runs a module, calls such as `torch.nn.functional.batch_norm` are looked up in
a table and go to a function of ours, which also knows the sample mask, takes its randomness from the step's inputs, and
returns new running statistics as outputs of the step instead of changing a tensor in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subfleet.protocol.errors import ExportError


class LayerContext:
    """What the replaced layers of one run share.

    Args:
        sample_mask_B: 1 for a real sample and 0 for padding, (batch,); None in inference.
        randoms: the step's random inputs, in the order of the calls that take them; None in the first run, which only
            determines their shapes.
        in_parts: whether the step's batch is one of several micro-batches.
        shapes_only: whether numbers do not matter, so that layers may skip them.
    """

    def __init__(
        self,
        sample_mask_B: Tensor | None,  # noqa: N803 - shapes in names
        randoms: Sequence[Tensor] | None = None,
        *,
        in_parts: bool = False,
        shapes_only: bool = False,
    ) -> None:
        self.sample_mask_B = sample_mask_B
        self.in_parts, self.shapes_only = in_parts, shapes_only
        self.layer = ""
        self._randoms = randoms
        self._random_shapes: list[tuple[int, ...]] = []
        self._random_count = 0
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._repeating = False
        self._going_back = False
        self._places: dict[str, list[int]] = {}
        self._shared: dict[Any, Any] = {}
        self._modes = torch._C._len_torch_dispatch_stack()  # noqa: SLF001 - PyTorch tells it nowhere else

    def share(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return a value that the first layer computes for all; computed anew inside a mode of the module."""
        if torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack() != self._modes:  # noqa: SLF001
            return make()
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    @property
    def random_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all random tensors taken so far."""
        return tuple(self._random_shapes)

    @property
    def random_count(self) -> int:
        """Number of random tensors taken so far."""
        return self._random_count

    def next_random(self, shape: Sequence[int]) -> Tensor:
        """Return the next random input of the step: float, uniform in [0, 1), of this shape.

        Raises:
            ExportError: the module asks for another shape than in its first run, or more often.
        """
        sizes, index = tuple(int(size) for size in shape), self._next_index()
        if self._randoms is None:
            if not self._repeating:
                self._random_shapes.append(sizes)
            return torch.zeros(sizes)
        if index >= len(self._randoms) or tuple(self._randoms[index].shape) != sizes:
            raise ExportError(
                f"layer {self.layer!r} asks for randomness of the shape {sizes}, but did not when the module first "
                "ran; its forward must do the same in every run"
            )
        return self._randoms[index]

    @property
    def is_run_again(self) -> bool:
        """Whether running layers do so in the backward pass because the network checkpoints them."""
        return self._going_back and not self._repeating

    def _next_index(self) -> int:
        """Return the index of the next random tensor; a layer that runs again reuses its only one."""
        if self.is_run_again:
            indices = self._places.get(self.layer, [])
            if len(indices) != 1:
                raise ExportError(
                    f"layer {self.layer!r} is run again in the backward pass but draws {len(indices)} times, so it "
                    "is unknown which draw to repeat; leave out torch.utils.checkpoint and set recompute instead"
                )
            return indices[0]
        index = self._random_count
        self._random_count += 1
        if not self._repeating:
            self._places.setdefault(self.layer, []).append(index)
        return index

    def buffer(self, tensor: Tensor) -> Tensor:
        """Return the latest value of a buffer: the one set by `update`, or the buffer itself."""
        return self._buffers.get(id(tensor), (tensor, tensor))[1]

    def update(self, tensor: Tensor, new: Tensor) -> None:
        """Set a buffer's value after this step; ignored if the layer is computed again."""
        if not (self._repeating or self._going_back):
            self._buffers[id(tensor)] = (tensor, new)  # the first is kept alive, so that its id stays unique

    @contextmanager
    def repeat(self, index: int) -> Iterator[None]:
        """Run a block once more: it gets the random tensors from `index` on again; its updates do not count."""
        before = (self._random_count, self._repeating)
        self._random_count, self._repeating = index, True
        try:
            yield
        finally:
            self._random_count, self._repeating = before

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Mark the backward pass: a layer that `torch.utils.checkpoint` runs again gets the same random tensor."""
        self._going_back = True
        try:
            yield
        finally:
            self._going_back = False


Replacement = Callable[..., Any]
"""Replaces a PyTorch function: takes the `LayerContext`, then the function's own arguments."""


class LayerReplacing(TorchFunctionMode):
    """Redirects calls of PyTorch functions with an entry in the table to their replacements.

    A replacement runs outside of the mode: the functions that it calls are plain PyTorch.
    """

    def __init__(self, table: Mapping[Any, Replacement], context: LayerContext) -> None:
        super().__init__()
        self._table = table
        self._context = context

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the replacement, or the function itself if there is none."""
        if torch.is_autocast_enabled("cpu"):
            raise ExportError(
                f"layer {self._context.layer!r} runs within torch.autocast, but a program computes only in "
                "torch.float32; leave autocast out, or give it enabled=False"
            )
        replacement = self._table.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self._context, *args, **(kwargs or {}))
