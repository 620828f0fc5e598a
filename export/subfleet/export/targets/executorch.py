"""Programs for ExecuTorch's standard runtime, with XNNPACK and with its portable and optimised kernels."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, fx

from subfleet.export.layouts import settle_layouts
from subfleet.export.lowerings.convolution_products import CONVOLUTIONS_AS_PRODUCTS, PRODUCTS_WITH_BIAS
from subfleet.export.lowerings.pooling import MAXIMUM_POOL_BACKWARD
from subfleet.export.lowerings.tables import COMMON
from subfleet.export.memory.executorch_plan import plan_executorch
from subfleet.export.steps.step import Step
from subfleet.export.targets.base import WrittenProgram
from subfleet.export.targets.executorch_program import constant_methods, lower_to_executorch
from subfleet.export.targets.xnnpack.delegating import delegate
from subfleet.export.tracing import inputs_of
from subfleet.protocol.errors import ExportError


class ExecutorchTarget:
    """ExecuTorch's .pte format. Its programs call XNNPACK, which the runtime must have."""

    name: ClassVar[str] = "executorch"
    lowerings: ClassVar[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
        {**COMMON, **MAXIMUM_POOL_BACKWARD, **CONVOLUTIONS_AS_PRODUCTS, **PRODUCTS_WITH_BIAS}
    )
    inference_lowerings: ClassVar[Mapping[Any, Callable[..., Any]]] = lowerings
    inference_batch_size: ClassVar[int] = 1
    any_inference_batch: ClassVar[bool] = False

    def write_training(self, graph: fx.GraphModule, step: Step) -> WrittenProgram:
        """Write a training step; see `Target`."""
        shared = delegate(settle_layouts(graph))
        program = lower_to_executorch(shared, {})
        body = bytes(program.buffer)
        plan = program.executorch_program.execution_plan[0]
        arena_bytes, packed = sum(plan.non_const_buffer_sizes), shared.meta.get("packed", ())
        memory = plan_executorch(step, body=body, arena_bytes=arena_bytes, packed=packed)
        kernels = {f"{kernel.name}.{kernel.overload}" if kernel.overload else kernel.name for kernel in plan.operators}
        operators = tuple(sorted({*kernels, *(delegate.id for delegate in plan.delegates)}))
        return WrittenProgram(body=body, memory=memory, operators=operators)

    def write_inference(
        self,
        graph: fx.GraphModule,
        step: Step,
        weights: Sequence[Tensor],
        *,
        any_batch: bool,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Write an inference step; see `Target`."""
        if any_batch:
            raise ExportError("a .pte has one batch size; write it for batches of that size")
        places = inputs_of(graph)
        held = {node.name: weight for node, weight in zip(places[1:], weights, strict=True)}
        return bytes(lower_to_executorch(delegate(settle_layouts(graph)), held, constant_methods(notes)).buffer)

    def run(self, body: bytes, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run a program once; see `Target`."""
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(body).load_method("forward")
        if method is None:
            raise ExportError("the written ExecuTorch program has no method 'forward'; report it with the request")
        # The runtime's outputs are in its own memory, which the next call overwrites.
        return tuple(result.clone() for result in method.execute(list(inputs.values())))
