"""From a flat graph to ExecuTorch's final program.

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

from subfleet.export.quiet import quiet
from subfleet.export.targets.executorch_operators import edge_target
from subfleet.export.tracing import inputs_of, results_of

__all__ = ["constant_methods", "hold_constants", "lower_to_executorch", "make_exported_program"]


def hold_constants(graph: fx.GraphModule) -> dict[str, Tensor]:
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

    # Our own table has checked the operators, and every tensor is contiguous.
    return EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)


def _backend_config() -> Any:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    # Inputs stay in the caller's memory: planned ones would be copied in, and held twice.
    # Outputs go to the caller's memory: planned ones would be copied out, and held three times.
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    return ExecutorchBackendConfig(memory_planning_pass=planning)


def _verifier() -> Any:
    from executorch.exir.verification.verifier import EXIREdgeDialectVerifier

    return EXIREdgeDialectVerifier(edge_compile_config=_compile_config(), class_only=True)


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

    held = {**weights, **hold_constants(graph)}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target not in {operator.getitem, executorch_call_delegate}:
            node.target = edge_target(node)
    graph.recompile()
    with quiet():
        manager = EdgeProgramManager(
            {"forward": make_exported_program(graph, held)}, dict(constants) or None, _compile_config()
        )
        return manager.to_executorch(_backend_config())
