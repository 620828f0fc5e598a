"""The baseline: plain eager PyTorch in its fastest memory layout."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from step_benchmark.data import Samples
from step_benchmark.stepping import Start, Weights

LAYOUTS: Mapping[str, torch.memory_format] = MappingProxyType(
    {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
)


class EagerStep:
    """A module and its optimiser. See `Stepper`.

    It shares nothing with the exported step: BatchNorm, loss and optimiser are PyTorch's own, and a smaller batch is
    not padded.
    """

    def __init__(self, start: Start, *, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> None:
        self._start = start
        self._dtype = dtype
        self._layout = LAYOUTS[layout]
        self._module = start.model.build().to(dtype).train()
        self._module.to(memory_format=self._layout)  # type: ignore[call-overload]
        self.begin()

    def begin(self) -> None:
        """Restart from the first weights."""
        self._module.load_state_dict(self._start.state)
        self._optimiser = torch.optim.SGD(
            self._module.parameters(),
            lr=self._start.learning_rate,
            momentum=self._start.optimiser.momentum,
            weight_decay=self._start.optimiser.weight_decay,
            foreach=True,
        )

    def prepare(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """A batch in this step's type and layout."""
        inputs = torch.from_numpy(np.ascontiguousarray(samples.inputs))
        if inputs.is_floating_point():
            inputs = inputs.to(self._dtype)
            if inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=self._layout)
        return inputs, torch.from_numpy(np.ascontiguousarray(samples.labels))

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """Take one step, and return the loss before it."""
        inputs, labels = batch
        self._optimiser.zero_grad(set_to_none=True)
        logits = self._module(inputs)
        loss = cross_entropy(logits.flatten(0, -2), labels.flatten())
        torch.autograd.backward(loss)
        self._optimiser.step()
        return loss.item()

    def finish(self) -> Weights:
        """Return parameters and floating-point buffers."""
        state = self._module.state_dict()
        return {
            name: tensor.detach().double().contiguous().clone().numpy()
            for name, tensor in state.items()
            if tensor.is_floating_point()
        }


def list_layouts(module: nn.Module) -> tuple[str, ...]:
    """The memory layouts that make a difference to a module."""
    return tuple(LAYOUTS) if any(isinstance(layer, nn.Conv2d) for layer in module.modules()) else ("contiguous",)
