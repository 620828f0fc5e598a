"""Runs a module on shapes before its step is built, and checks what the run does to the module's state."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from subfleet.export.layers import LayerContext
from subfleet.export.steps.module_calls import (
    call_with_state,
    check_types,
    constants_of,
    prepare_module,
    run_exits,
    set_constants,
    state_of,
)
from subfleet.export.steps.run_checks import RunEffects, TensorTies, WriteWatcher, check_repeats
from subfleet.export.steps.seeding import SeededRandomness
from subfleet.export.steps.state_snapshot import StateSnapshot
from subfleet.export.steps.step import DTYPES
from subfleet.export.tools import as_export_errors
from subfleet.protocol.programs import ValueInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShapes:
    """The shapes that a run of a module has shown.

    Attributes:
        output_shapes: of the logits of each exit, one or more.
        random_shapes: of the random inputs that its layers take, in order.
    """

    output_shapes: tuple[tuple[int, ...], ...]
    random_shapes: tuple[tuple[int, ...], ...]


def run_on_shapes(module: nn.Module, sample: ValueInfo, *, training: bool, in_parts: bool = False) -> ModuleShapes:
    """Run a module on shapes only.

    Args:
        module: as in `training_step`.
        sample: the step's input.
        training: whether the module is to be trained.
        in_parts: whether its batch is one of several micro-batches.

    Raises:
        ExportError: the state has an unsupported type, the module does not accept the input, it changes state that no
            step carries and reads it in the next run, or its shapes depend on values.
    """
    check_types(module)
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    inputs = torch.zeros(sample.shape, dtype=dtypes[sample.dtype])

    def context(*, shapes_only: bool = False) -> LayerContext:
        mask = torch.zeros(sample.shape[:1]) if training else None
        return LayerContext(mask, in_parts=in_parts, shapes_only=shapes_only)

    problem = f"the network cannot be traced on an input of the shape {sample.shape}"
    with as_export_errors(problem, "use layers that take this shape, and whose shapes do not depend on values"):
        with SeededRandomness(0) as chance:
            run, traces = _run_watched(module, inputs, context(shapes_only=True), training=training)
        traces = replace(traces, drew=chance.was_used)
        if traces.changes or traces.counts:
            check_repeats(module, inputs, context(), traces, training=training)
    return run


def _run_watched(
    module: nn.Module, inputs: Tensor, context: LayerContext, *, training: bool
) -> tuple[ModuleShapes, RunEffects]:
    """Run the module; return its shapes, and the effects that the run leaves behind."""
    state = state_of(module)
    carried = {id(tensor) for tensor in state.values()}
    with prepare_module(module, context, training=training), torch.no_grad():
        plain = {name: tensor.detach() for name, tensor in (state | constants_of(module)).items()}
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            shapes = {name: fake.from_tensor(tensor) for name, tensor in plain.items()}
            run_state = {name: shapes[name] for name in state}
            set_constants(module, {name: tensor for name, tensor in shapes.items() if name not in state})
            ties = TensorTies(module, state, run_state)
            before = StateSnapshot(module)

            def run() -> tuple[Tensor, ...]:
                outputs = run_exits(module, inputs)
                ties.check(module)
                return outputs

            fixed = {name: tensor for name, tensor in before.tensors.items() if id(tensor) not in carried}
            with WriteWatcher(fixed, [*state.values(), *run_state.values()], fake) as writes:
                outputs = call_with_state(module, run_state, run)
            writes.check()
            traces = RunEffects(changes=before.changes(), sources=before.sources)
    return ModuleShapes(
        output_shapes=tuple(tuple(map(int, tensor.shape)) for tensor in outputs), random_shapes=context.random_shapes
    ), traces
