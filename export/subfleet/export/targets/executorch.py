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

from subfleet.export.lowerings.pooling import MAXIMUM_POOL_BACKWARD
from subfleet.export.lowerings.products import CONVOLUTIONS_AS_PRODUCTS
from subfleet.export.lowerings.tables import COMMON
from subfleet.export.memory.executorch_plan import plan_executorch
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
        aten.select.int: aten.select_copy.int,
        aten.squeeze.dim: aten.squeeze_copy.dim,
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
        aten._softmax.default,  # noqa: SLF001 - the operator's name
        aten._to_copy.default,  # noqa: SLF001 - the operator's name
        aten.abs.default,
        aten.addmm.default,
        aten.amax.default,
        aten.amin.default,
        aten.arange.start_step,
        aten.argmax.default,
        aten.argmin.default,
        aten.as_strided_copy.default,
        aten.bmm.default,
        aten.cat.default,
        aten.ceil.default,
        aten.clamp.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.convolution.default,
        aten.cos.default,
        aten.cumsum.default,
        aten.embedding.default,
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.erf.default,
        aten.exp.default,
        aten.flip.default,
        aten.floor.default,
        aten.full.default,
        aten.gather.default,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.index_put.default,
        aten.index_select.default,
        aten.le.Scalar,
        aten.le.Tensor,
        aten.leaky_relu.default,
        aten.log.default,
        aten.logical_and.default,
        aten.logical_not.default,
        aten.logical_or.default,
        aten.logical_xor.default,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.masked_fill.Scalar,
        aten.max_pool2d_with_indices.default,
        aten.maximum.default,
        aten.mean.dim,
        aten.minimum.default,
        aten.mm.default,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
        aten.ne.Scalar,
        aten.ne.Tensor,
        aten.neg.default,
        aten.ones.default,
        aten.pow.Scalar,
        aten.pow.Tensor_Scalar,
        aten.pow.Tensor_Tensor,
        aten.prod.default,
        aten.prod.dim_int,
        aten.reciprocal.default,
        aten.relu.default,
        aten.repeat.default,
        aten.round.default,
        aten.rsqrt.default,
        aten.rsub.Scalar,
        aten.scalar_tensor.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.sigmoid.default,
        aten.sign.default,
        aten.sin.default,
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


def _hold_constants(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Make a graph's constant tensors inputs that the program holds inside; each by the name of its input."""
    held: dict[str, Tensor] = {}
    last = inputs_of(graph)[-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"constant_{node.name.lstrip('_')}")
        value = getattr(graph, node.target).detach()
        last.meta["val"] = node.meta.get("val", next(iter(node.users)).meta["val"])
        held[last.name] = value
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    return held


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

    held = {**weights, **_hold_constants(graph)}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            node.target = _edge_target(node)
    graph.recompile()
    with _quiet():
        manager = EdgeProgramManager({"forward": _exported(graph, held)}, None, _compile_config())
        return manager.to_executorch(_backend_config())


class ExecutorchTarget:
    """ExecuTorch's .pte."""

    name: ClassVar[str] = "executorch"
    lowerings: ClassVar[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
        {**COMMON, **MAXIMUM_POOL_BACKWARD, **CONVOLUTIONS_AS_PRODUCTS}
    )
    inference_lowerings: ClassVar[Mapping[Any, Callable[..., Any]]] = lowerings
    inference_batch_size: ClassVar[int] = 1
    any_inference_batch: ClassVar[bool] = False

    def write_training(self, graph: fx.GraphModule, step: Step) -> WrittenProgram:
        """Write a training step; see `Target`."""
        program = _lower(graph, {})
        body = bytes(program.buffer)
        memory = plan_executorch(
            step,
            arena_bytes=sum(program.executorch_program.execution_plan[0].non_const_buffer_sizes),
            program_bytes=len(body),
        )
        return WrittenProgram(body=body, memory=memory)

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
