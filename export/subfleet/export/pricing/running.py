"""From a request to its program as it runs, with its exact plan; nothing is verified, as nothing is sent."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from subfleet.export.memory.executorch_plan import grown, plan_grown
from subfleet.export.memory.liveness import GIVEN_BACK, activation_peak_bytes, graph_requests
from subfleet.export.memory.onnx_blocks import Take, node_requests
from subfleet.export.memory.onnx_plan import plan_ran
from subfleet.export.memory.onnx_run import run_onnx
from subfleet.export.pricing.recording import Node, PlannedStep
from subfleet.export.pricing.xnnpack_calls import Call, nodes_of, region_calls
from subfleet.export.steps.values import Step
from subfleet.export.tracing import inputs_of, results_of, trace
from subfleet.protocol.errors import ExportError
from subfleet.protocol.memory import MemoryPlan
from subfleet.protocol.programs import ValueInfo

__all__ = ["run_step"]

_TRAINED = frozenset({"parameter", "optimiser_state", "gradient"})
_INSTRUCTION_BYTES = 10_000
"""Of what ExecuTorch holds for a kernel of its own."""


def run_step(step: Step, target: str) -> tuple[PlannedStep, MemoryPlan]:
    """Write a step for a target and plan it.

    Raises:
        ExportError: it cannot be written, or the target is unknown.
    """
    if target not in _RUNS:
        raise ExportError(f"target is {target!r}, but must be one of {sorted(_RUNS)} ")
    return _RUNS[target](step)


def _run_onnx(step: Step) -> tuple[PlannedStep, MemoryPlan]:
    from subfleet.export.targets.onnx import OnnxTarget, training_model

    body = training_model(trace(step, OnnxTarget.lowerings), step)
    ran = run_onnx(body, step.inputs)
    nodes = tuple(
        Node(
            inputs=tuple(filter(None, node.inputs)),
            outputs=tuple(filter(None, node.outputs)),
            requests=tuple((r.name, r.size_bytes if isinstance(r, Take) else GIVEN_BACK) for r in requests),
            formulas={r.name: r.formula for r in requests if isinstance(r, Take) and r.formula is not None},
        )
        for node, requests in zip(ran.nodes, node_requests(ran), strict=True)
    )
    names = {value.name: value.name for value in (*step.inputs, *step.outputs)}
    return _planned(step, nodes, names, ran.session_bytes), plan_ran(ran, step, body_bytes=len(body))


def _run_executorch(step: Step) -> tuple[PlannedStep, MemoryPlan]:
    from subfleet.export.layouts import settled
    from subfleet.export.targets.executorch import ExecutorchTarget
    from subfleet.export.targets.executorch_program import lower
    from subfleet.export.targets.xnnpack.delegating import delegated
    from subfleet.export.targets.xnnpack.preparing import prepare

    graph = settled(trace(step, ExecutorchTarget.lowerings))
    prepare(graph)
    values = _node_names(step, graph)
    nodes = tuple(nodes_of(list(_calls(graph)), set(values.values())))
    program = lower(delegated(graph), {})
    arena_bytes = sum(program.executorch_program.execution_plan[0].non_const_buffer_sizes)
    body = bytes(program.buffer)
    growth = grown(body, step, arena_bytes=arena_bytes)
    plan = plan_grown(growth, step, body_bytes=len(body), arena_bytes=arena_bytes)
    return _planned(step, nodes, values, growth.load_bytes), plan


def _run_torch(step: Step) -> tuple[PlannedStep, MemoryPlan]:
    from subfleet.export.targets.torch import plan_torch

    graph = trace(step, {})
    values = _node_names(step, graph)
    nodes = tuple(
        Node(inputs=tuple(given.name for given in node.all_input_nodes), outputs=(node.name,), requests=requests)
        for node, requests in graph_requests(graph)
        if node.op == "call_function"
    )
    plan = plan_torch(step, activation_bytes=activation_peak_bytes(graph))
    # What eager PyTorch holds beside its activations grows with the parameters.
    beside_bytes = plan_torch(step, activation_bytes=0).workspace_bytes
    return _planned(step, nodes, values), replace(
        plan, weights_bytes=plan.weights_bytes + beside_bytes, workspace_bytes=plan.workspace_bytes - beside_bytes
    )


def _node_names(step: Step, graph: fx.GraphModule) -> dict[str, str]:
    """The nodes of a graph by the step's values."""
    nodes = (*inputs_of(graph), *results_of(graph))
    return {value.name: node.name for value, node in zip((*step.inputs, *step.outputs), nodes, strict=True)}


def _planned(step: Step, nodes: tuple[Node, ...], names: Mapping[str, str], objects_bytes: int = 0) -> PlannedStep:
    """Args: names: of the step's values in the nodes."""

    def of(values: Sequence[ValueInfo], roles: frozenset[str]) -> dict[str, str]:
        return {names[value.name]: value.tensor for value in values if value.role in roles and value.tensor}

    return PlannedStep(
        nodes=nodes,
        held=of(step.inputs, _TRAINED | {"buffer"}),
        given=of(step.outputs, _TRAINED),
        batch=names[next(value.name for value in step.inputs if value.role == "input")],
        loss=names[next(value.name for value in step.outputs if value.role == "loss")],
        objects_bytes=objects_bytes,
    )


def _calls(graph: fx.GraphModule) -> Iterator[Call]:
    """The nodes of XNNPACK's regions and those between them."""
    from subfleet.export.targets.xnnpack.delegating import region_graph
    from subfleet.export.targets.xnnpack.operators import is_supported
    from subfleet.export.targets.xnnpack.regions import Region, split

    number = 0
    for part in split(graph.graph, is_supported):
        if isinstance(part, Region):
            names = [node.name for node in (*part.inputs, *part.outputs)]
            number += 1
            yield from region_calls(region_graph(part), names, number)
            continue
        for node in part:
            number += node.target is not operator.getitem
            yield Call(
                kind="",
                inputs=tuple(argument.name for argument in node.all_input_nodes),
                output=node.name,
                size_bytes=_bytes_of(node.meta.get("val")),
                part=number,
                object_bytes=_INSTRUCTION_BYTES,
            )


def _bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


_RUNS: Mapping[str, Callable[[Step], tuple[PlannedStep, MemoryPlan]]] = MappingProxyType(
    {"onnx": _run_onnx, "executorch": _run_executorch, "torch": _run_torch}
)
