"""Programs for ExecuTorch's plain runtime with its portable and optimised kernels.

The lowered graph is small and flat, so it is put into ExecuTorch's edge dialect here, node by node. ExecuTorch's own
way there (`to_edge`, `to_edge_transform_and_lower`) traces the graph again a dozen times and gives the same program.
"""

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from subfleet.export.liveness import executorch_planned_peak_bytes
from subfleet.export.lowerings.activation import ACTIVATIONS
from subfleet.export.lowerings.normalisation import NORMALISATIONS
from subfleet.export.lowerings.products import CONVOLUTIONS_AS_PRODUCTS
from subfleet.export.steps.values import Step
from subfleet.export.targets.base import WrittenProgram
from subfleet.export.tracing import inputs_of, results_of
from subfleet.protocol.errors import ExportError

__all__ = ["ExecutorchTarget"]

aten = torch.ops.aten

_COPIES: Mapping[Any, Any] = MappingProxyType(
    {
        aten.view.default: aten.view_copy.default,
        aten.expand.default: aten.expand_copy.default,
        aten.transpose.int: aten.transpose_copy.int,
        aten.permute.default: aten.permute_copy.default,
        aten.unsqueeze.default: aten.unsqueeze_copy.default,
        aten.squeeze.dims: aten.squeeze_copy.dims,
        aten.slice.Tensor: aten.slice_copy.Tensor,
        aten.t.default: aten.t_copy.default,
    }
)
"""The runtime has no views: each becomes its copying form, some of which the memory planner elides again."""

_WITH_NUMBER: Mapping[Any, Any] = MappingProxyType(
    {
        aten.add.Tensor: aten.add.Scalar,
        aten.sub.Tensor: aten.sub.Scalar,
        aten.mul.Tensor: aten.mul.Scalar,
        aten.div.Tensor: aten.div.Scalar,
    }
)
"""A tensor operator whose second operand is a number has a kernel of its own."""

_KNOWN: frozenset[Any] = frozenset(
    {
        *_COPIES.values(),
        *_WITH_NUMBER,
        *_WITH_NUMBER.values(),
        aten._log_softmax.default,  # noqa: SLF001 - the operator's name
        aten._to_copy.default,  # noqa: SLF001 - the operator's name
        aten.abs.default,
        aten.addmm.default,
        aten.amax.default,
        aten.arange.start_step,
        aten.argmax.default,
        aten.as_strided_copy.default,
        aten.bmm.default,
        aten.cat.default,
        aten.clamp.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.convolution.default,
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.exp.default,
        aten.flip.default,
        aten.full.default,
        aten.ge.Scalar,
        aten.gt.Scalar,
        aten.le.Scalar,
        aten.log.default,
        aten.lt.Scalar,
        aten.mean.dim,
        aten.mm.default,
        aten.native_group_norm.default,
        aten.neg.default,
        aten.relu.default,
        aten.rsqrt.default,
        aten.scalar_tensor.default,
        aten.sigmoid.default,
        aten.sign.default,
        aten.sqrt.default,
        aten.sum.dim_IntList,
        aten.tanh.default,
        aten.where.self,
        aten.zeros.default,
    }
)
"""Operators with a kernel in the runtime that every build carries; the tests run each of them through it."""

_DROPPED_OPTIONS = frozenset({"device", "layout", "pin_memory"})


def _edge_target(node: fx.Node) -> Any:
    """The operator in ExecuTorch's dialect that does what a node does; its arguments are adapted in place."""
    from executorch.exir.dialects._ops import ops as dialects

    target: Any = _COPIES.get(node.target, node.target)
    if target in _WITH_NUMBER and not isinstance(node.args[1], fx.Node):
        target = _WITH_NUMBER[target]
    if target is aten.arange.default:
        target, node.args = aten.arange.start_step, (0, *node.args)
    if target not in _KNOWN:
        shape = tuple(getattr(node.meta.get("val"), "shape", ()))
        raise ExportError(
            f"the operator {target} (node {node.name!r}, giving {shape}) has no ExecuTorch kernel in every runtime; "
            "use another layer, or add a lowering for it in subfleet.export.lowerings"
        )
    dropped = {*_DROPPED_OPTIONS, "memory_format"} if target is aten.clone.default else _DROPPED_OPTIONS
    node.kwargs = {name: option for name, option in node.kwargs.items() if name not in dropped}
    packet = getattr(dialects.edge.aten, target._schema.name.split("::")[1])  # noqa: SLF001 - no public name
    return getattr(packet, target._overloadname)  # noqa: SLF001 - no public name


def _exported(graph: fx.GraphModule, weights: Mapping[str, Tensor]) -> ExportedProgram:
    """Wrap a graph in ExecuTorch's dialect as an exported program, with inputs named in `weights` held inside."""
    places = inputs_of(graph)
    results = results_of(graph)
    free = [node for node in places if node.name not in weights]
    inputs = [
        InputSpec(InputKind.BUFFER, TensorArgument(name=node.name), target=node.name, persistent=True)
        if node.name in weights
        else InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), target=None)
        for node in places
    ]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in results]
    _, input_tree = pytree.tree_flatten((tuple(range(len(free))), {}))
    _, output_tree = pytree.tree_flatten(tuple(range(len(results))))
    call = ModuleCallSignature(inputs=[], outputs=[], in_spec=input_tree, out_spec=output_tree)
    return ExportedProgram(
        root=graph,
        graph=graph.graph,
        graph_signature=ExportGraphSignature(input_specs=inputs, output_specs=outputs),
        state_dict=dict(weights),
        range_constraints={},
        module_call_graph=[ModuleCallEntry(fqn="", signature=call)],
        constants={},
        verifiers=[_verifier()],
    )


def _compile_config() -> Any:
    from executorch.exir import EdgeCompileConfig

    # The operators were checked against our own table, and every tensor is contiguous.
    return EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)


def _backend_config() -> Any:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    # Inputs stay where the caller has them: planned ones would be copied in, and held twice.
    return ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False))


def _verifier() -> Any:
    from executorch.exir.verification.verifier import EXIREdgeDialectVerifier

    return EXIREdgeDialectVerifier(edge_compile_config=_compile_config(), class_only=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """ExecuTorch logs every pass as a warning; what matters comes as an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _lower(graph: fx.GraphModule, weights: Mapping[str, Tensor]) -> Any:
    """Lower a traced graph to ExecuTorch's final program."""
    from executorch.exir import EdgeProgramManager

    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            node.target = _edge_target(node)
        elif node.op == "get_attr":
            raise ExportError(f"the step holds the constant tensor {node.target!r}; make it an input or a parameter")
    graph.recompile()
    with _quiet():
        manager = EdgeProgramManager({"forward": _exported(graph, weights)}, None, _compile_config())
        return manager.to_executorch(_backend_config())


class ExecutorchTarget:
    """ExecuTorch's .pte."""

    name: ClassVar[str] = "executorch"
    lowerings: ClassVar[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
        {**ACTIVATIONS, **NORMALISATIONS, **CONVOLUTIONS_AS_PRODUCTS}
    )
    inference_lowerings: ClassVar[Mapping[Any, Callable[..., Any]]] = lowerings
    inference_batch_size: ClassVar[int] = 1
    any_inference_batch: ClassVar[bool] = False

    def write_training(self, graph: fx.GraphModule, step: Step) -> WrittenProgram:
        """Write a training step; see `Target`."""
        program = _lower(graph, {})
        body = bytes(program.buffer)
        planned = executorch_planned_peak_bytes(
            step,
            arena_bytes=sum(program.executorch_program.execution_plan[0].non_const_buffer_sizes),
            program_bytes=len(body),
        )
        return WrittenProgram(body=body, planned_peak_bytes=planned)

    def write_inference(self, graph: fx.GraphModule, step: Step, weights: Sequence[Tensor]) -> bytes:
        """Write an inference step for batches of `inference_batch_size`; see `Target`."""
        places = inputs_of(graph)
        held = {node.name: weight for node, weight in zip(places[1:], weights, strict=True)}
        return bytes(_lower(graph, held).buffer)

    def run(self, body: bytes, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run a program once; see `Target`."""
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(body).load_method("forward")
        if method is None:
            raise ExportError("the written ExecuTorch program has no method 'forward'; report it with the request")
        # The runtime's outputs lie in its own memory, which the next call overwrites.
        return tuple(result.clone() for result in method.execute(list(inputs.values())))
