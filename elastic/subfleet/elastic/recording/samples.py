"""Random samples for a module, and its call with them."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.recording.inputs import InputPart, Inputs, count_symbols


def draw_input(part: InputPart, batch_size: int, generator: torch.Generator) -> Tensor:
    """A batch of one input, random."""
    shape = (batch_size, *part.shape)
    if part.symbols:
        return torch.randint(part.symbols, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def draw_samples(inputs: Inputs, batch_size: int, generator: torch.Generator) -> Tensor:
    """A batch of random samples that hold several inputs."""
    return torch.cat([draw_input(part, batch_size, generator).flatten(1) for part in inputs.values()], 1)


def call_module(module: nn.Module, samples: Tensor, inputs: Inputs) -> Any:
    """Call a module with samples, or with the inputs that they hold.

    Tokens stay within their vocabulary whatever a sample holds, since programs are tried with random samples.
    """
    if not inputs:
        return module(samples)
    begin, named = 0, dict[str, Tensor]()
    for name, part in inputs.items():
        end = begin + math.prod(part.shape)
        own = samples[:, begin:end]
        if len(part.shape) > 1:
            own = own.reshape(-1, *part.shape)
        if part.symbols and part.symbols != count_symbols(inputs):
            own = own.long().clamp(0, part.symbols - 1)
        named[name] = own
        begin = end
    return module(**named)
