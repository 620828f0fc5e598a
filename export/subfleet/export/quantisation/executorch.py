"""Eight-bit models for ExecuTorch, by torchao's quantiser and XNNPACK's rules."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from subfleet.export.quiet import quiet
from subfleet.export.targets.executorch_program import constant_methods

__all__ = ["quantise_executorch"]


def quantise_executorch(
    module: nn.Module, mode: str, samples: npt.NDArray[np.generic], notes: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Write a module as a .pte model with 8-bit weights, for one sample at a time.

    Args:
        module: in evaluation mode, with its weights.
        mode: "dynamic" quantises the inputs of linear layers in every run; "static" also those of convolutions, with
            ranges from the samples.
        samples: inputs (count, *sample shape) such as the model will meet.
        notes: texts that the model carries, by name.

    Returns:
        The program, delegated to XNNPACK.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    inputs = torch.from_numpy(np.ascontiguousarray(samples))
    example = (inputs[:1],)
    settings = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=mode == "dynamic")
    with quiet(), torch.no_grad():
        graph: Any = torch.export.export(module, example).module()
        prepared = prepare_pt2e(graph, XNNPACKQuantizer().set_global(settings))
        _observe(prepared, inputs)
        exported = torch.export.export(convert_pt2e(prepared), example)
        edge = to_edge_transform_and_lower(
            exported, partitioner=[XnnpackPartitioner()], constant_methods=dict(constant_methods(notes)) or None
        )
        program = edge.to_executorch()
    return bytes(program.buffer)


def _observe(prepared: Any, inputs: Tensor) -> None:
    """Let the quantiser see the ranges of the activations."""
    for index in range(len(inputs)):
        prepared(inputs[index : index + 1])
