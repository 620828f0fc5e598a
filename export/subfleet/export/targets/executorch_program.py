"""From a flat graph of PyTorch's operators to ExecuTorch's final program.

The graph is converted to ExecuTorch's edge dialect here, node by node. ExecuTorch's own conversion (`to_edge`,
`to_edge_transform_and_lower`) traces the graph a dozen times and gives the same program.
"""

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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

from subfleet.export.targets.instead import suggest_alternative
from subfleet.export.tools import quiet
from subfleet.export.tracing import inputs_of, results_of
from subfleet.protocol.errors import ExportError

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
"""The runtime has no views: each becomes its copying form; the memory planner removes some of these again."""

_WITH_NUMBER: Mapping[Any, Any] = MappingProxyType(
    {
        aten.add.Tensor: aten.add.Scalar,
        aten.sub.Tensor: aten.sub.Scalar,
        aten.mul.Tensor: aten.mul.Scalar,
        aten.div.Tensor: aten.div.Scalar,
    }
)
"""Tensor operators with a separate kernel for a number as the second operand."""

_KNOWN: frozenset[Any] = frozenset({
    *_COPIES.values(), *_WITH_NUMBER, *_WITH_NUMBER.values(), aten.abs.default, aten.addmm.default,
    aten.amax.default, aten.amin.default, aten.arange.start_step, aten.argmax.default, aten.argmin.default,
    aten.as_strided_copy.default, aten.bmm.default, aten.cat.default, aten.ceil.default, aten.clamp.default,
    aten.clone.default, aten.constant_pad_nd.default, aten.convolution.default, aten.cos.default,
    aten.cumsum.default, aten.embedding.default, aten.eq.Scalar, aten.eq.Tensor, aten.erf.default, aten.exp.default,
    aten.flip.default, aten.floor.default, aten.full.default, aten.gather.default, aten.ge.Scalar, aten.ge.Tensor,
    aten.gt.Scalar, aten.gt.Tensor, aten.index_put.default, aten.index_select.default, aten.le.Scalar,
    aten.le.Tensor, aten.leaky_relu.default, aten.log.default, aten.logical_and.default, aten.logical_not.default,
    aten.logical_or.default, aten.logical_xor.default, aten.lt.Scalar, aten.lt.Tensor, aten.masked_fill.Scalar,
    aten.max_pool2d_with_indices.default, aten.maximum.default, aten.mean.dim, aten.minimum.default,
    aten.mm.default, aten.native_group_norm.default, aten.native_layer_norm.default, aten.ne.Scalar, aten.ne.Tensor,
    aten.neg.default, aten.ones.default, aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor,
    aten.prod.default, aten.prod.dim_int, aten.reciprocal.default, aten.relu.default, aten.repeat.default,
    aten.round.default, aten.rsqrt.default, aten.rsub.Scalar, aten.scalar_tensor.default, aten.scatter.src,
    aten.scatter.value, aten.scatter_add.default, aten.sigmoid.default, aten.sign.default, aten.sin.default,
    aten.sqrt.default, aten.sum.dim_IntList, aten.tanh.default, aten.where.self, aten.zeros.default,
    aten._log_softmax.default, aten._softmax.default, aten._to_copy.default,  # noqa: SLF001 - the operators' names
})  # fmt: skip
"""Operators with a kernel in every build of the runtime; the tests run each of them."""

_DROPPED_OPTIONS = frozenset({"device", "layout", "pin_memory"})


def _edge_target(node: fx.Node) -> Any:
    """Return the operator in ExecuTorch's dialect that does what a node does; its arguments are adapted in place."""
    from executorch.exir.dialects._ops import ops as dialects

    target: Any = _COPIES.get(node.target, node.target)
    if target in _WITH_NUMBER and not isinstance(node.args[1], fx.Node):
        target = _WITH_NUMBER[target]
    if target is aten.arange.default:
        target, node.args = aten.arange.start_step, (0, *node.args)
    if target not in _KNOWN:
        raise ExportError(
            f"not every ExecuTorch runtime has a kernel for {target} (node {node.name!r}); "
            f"{suggest_alternative(target)}"
        )
    dropped = {*_DROPPED_OPTIONS, "memory_format"} if target is aten.clone.default else _DROPPED_OPTIONS
    node.kwargs = {name: option for name, option in node.kwargs.items() if name not in dropped}
    packet = getattr(dialects.edge.aten, target._schema.name.split("::")[1])  # noqa: SLF001 - no public name
    return getattr(packet, target._overloadname)  # noqa: SLF001 - no public name


def _hold_constants(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Turn a graph's constant tensors into inputs that the program contains; return them by input name."""
    held: dict[str, Tensor] = {}
    last = inputs_of(graph)[-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        if not isinstance(getattr(graph, node.target), Tensor):
            continue  # a delegate
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"constant_{node.name.lstrip('_')}")
        value = getattr(graph, node.target).detach()
        last.meta["val"] = node.meta.get("val", next(iter(node.users)).meta["val"])
        held[last.name] = value
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    return held


def make_exported_program(graph: fx.GraphModule, weights: Mapping[str, Tensor]) -> ExportedProgram:
    """Wrap a graph in ExecuTorch's dialect as an exported program that contains the inputs named in `weights`."""
    from executorch.exir.verification.verifier import EXIREdgeDialectVerifier

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
        verifiers=[EXIREdgeDialectVerifier(edge_compile_config=_compile_config(), class_only=True)],
    )


def _compile_config() -> Any:
    from executorch.exir import EdgeCompileConfig

    # Our own table has checked the operators, and every tensor is contiguous.
    return EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)


def _backend_config() -> Any:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    # Inputs stay in the caller's memory: planned ones would be copied in, and held twice.
    # Outputs go to the caller's memory: planned ones would be copied out, and held three times.
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    return ExecutorchBackendConfig(memory_planning_pass=planning)


def constant_methods(notes: Mapping[str, str]) -> dict[str, Tensor]:
    """Return a model's additional methods: each returns the text of a note."""
    return {name: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for name, text in notes.items()}


def lower_to_executorch(
    graph: fx.GraphModule, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor] = MappingProxyType({})
) -> Any:
    """Lower a flat graph, which may call delegates, to ExecuTorch's final program.

    Args:
        graph: of the method "forward".
        weights: tensors that the program contains, by input.
        constants: results of further methods, by name.
    """
    from executorch.exir import EdgeProgramManager
    from executorch.exir.delegate import executorch_call_delegate

    held = {**weights, **_hold_constants(graph)}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target not in {operator.getitem, executorch_call_delegate}:
            node.target = _edge_target(node)
    graph.recompile()
    with quiet():
        manager = EdgeProgramManager(
            {"forward": make_exported_program(graph, held)}, dict(constants) or None, _compile_config()
        )
        return manager.to_executorch(_backend_config())
