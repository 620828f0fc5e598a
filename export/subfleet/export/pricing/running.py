"""From a request to its program as it runs, with its exact plan; nothing is verified, as nothing is sent."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from subfleet.export.memory.executorch_plan import plan_executorch
from subfleet.export.memory.liveness import GIVEN_BACK, activation_peak_bytes, graph_requests
from subfleet.export.memory.onnx_blocks import Take, node_requests
from subfleet.export.memory.onnx_plan import plan_ran
from subfleet.export.memory.onnx_run import run_onnx
from subfleet.export.pricing.recording import Node, PlannedStep
from subfleet.export.steps.values import Step
from subfleet.export.tracing import inputs_of, results_of, trace
from subfleet.protocol.errors import ExportError
from subfleet.protocol.memory import MemoryPlan
from subfleet.protocol.programs import ValueInfo

__all__ = ["run_step"]

_TRAINED = frozenset({"parameter", "optimiser_state", "gradient"})
_FLOAT_BYTES = 4
_PRODUCTS = frozenset({"BatchMatrixMultiply", "FullyConnected"})
_READ_BEYOND_BYTES = 128
"""XNNPACK's kernels may read so far beyond a tensor, which has room for that."""
_PACKED_COLUMNS = 32
"""XNNPACK lays a product's second factor out anew, in stripes of so many columns (with AVX-512; others have fewer)."""
_IN_PLACE = frozenset(
    {
        "Abs",
        "Add",
        "Clamp",
        "Copy",
        "Div",
        "Exp",
        "Log",
        "Maximum",
        "Minimum",
        "Multiply",
        "Negate",
        "ReciprocalSquareRoot",
        "Sigmoid",
        "SquareRoot",
        "StaticReshape",
        "Subtract",
        "Tanh",
    }
)
"""XNNPACK's nodes that write over an input of the same size which nothing else reads any more."""


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
        )
        for node, requests in zip(ran.nodes, node_requests(ran), strict=True)
    )
    names = {value.name: value.name for value in (*step.inputs, *step.outputs)}
    return _planned(step, nodes, names), plan_ran(ran, step, body_bytes=len(body))


def _run_executorch(step: Step) -> tuple[PlannedStep, MemoryPlan]:
    from subfleet.export.layouts import settled
    from subfleet.export.targets.executorch import ExecutorchTarget
    from subfleet.export.targets.executorch_program import lower
    from subfleet.export.targets.xnnpack.delegating import delegated
    from subfleet.export.targets.xnnpack.preparing import prepare

    graph = settled(trace(step, ExecutorchTarget.lowerings))
    prepare(graph)
    values = dict(zip((value.name for value in step.inputs), (node.name for node in inputs_of(graph)), strict=True))
    results = (node.name for node in results_of(graph))
    values |= dict(zip((value.name for value in step.outputs), results, strict=True))
    planned = _planned(step, tuple(_with_requests(list(_calls(graph)), set(values.values()))), values)
    program = lower(delegated(graph), {})
    arena_bytes = sum(program.executorch_program.execution_plan[0].non_const_buffer_sizes)
    body = bytes(program.buffer)
    return planned, plan_executorch(step, body=body, arena_bytes=arena_bytes)


def _run_torch(step: Step) -> tuple[PlannedStep, MemoryPlan]:
    from subfleet.export.targets.torch import plan_torch

    graph = trace(step, {})
    values = dict(zip((value.name for value in step.inputs), (node.name for node in inputs_of(graph)), strict=True))
    results = (node.name for node in results_of(graph))
    values |= dict(zip((value.name for value in step.outputs), results, strict=True))
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


def _planned(step: Step, nodes: tuple[Node, ...], names: Mapping[str, str]) -> PlannedStep:
    """Args: names: of the step's values in the nodes."""

    def of(values: Sequence[ValueInfo], roles: frozenset[str]) -> dict[str, str]:
        return {names[value.name]: value.tensor for value in values if value.role in roles and value.tensor}

    return PlannedStep(
        nodes=nodes,
        held=of(step.inputs, _TRAINED | {"buffer"}),
        given=of(step.outputs, _TRAINED),
        batch=names[next(value.name for value in step.inputs if value.role == "input")],
        loss=names[next(value.name for value in step.outputs if value.role == "loss")],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A node of XNNPACK's, or of the runtime's own; an output of size 0 takes no block."""

    inputs: tuple[str, ...]
    output: str
    size_bytes: int
    scratch_bytes: int = 0
    in_place: bool = False


def _calls(graph: fx.GraphModule) -> Iterator[_Call]:
    from subfleet.export.targets.xnnpack.delegating import region_graph
    from subfleet.export.targets.xnnpack.operators import is_supported
    from subfleet.export.targets.xnnpack.regions import Region, split

    for number, part in enumerate(split(graph.graph, is_supported)):
        if not isinstance(part, Region):
            for node in part:
                yield _Call(
                    inputs=tuple(argument.name for argument in node.all_input_nodes),
                    output=node.name,
                    size_bytes=_bytes_of(node.meta.get("val")),
                )
            continue
        written = region_graph(part)
        names = dict(zip(written.inputs, (node.name for node in part.inputs), strict=True))
        names |= dict(zip(written.outputs, (node.name for node in part.outputs), strict=True))
        for kind, inputs, output in written.calls():
            given = [names.get(value, f"{number}/{value}") for value in inputs if not written.is_constant(value)]
            yield _Call(
                inputs=tuple(given),
                output=names.get(output, f"{number}/{output}"),
                size_bytes=_FLOAT_BYTES * math.prod(written.shape(output)) + _READ_BEYOND_BYTES,
                scratch_bytes=_packed_bytes(written.shape(inputs[1]), written.shape(output))
                if kind in _PRODUCTS
                else 0,
                in_place=kind in _IN_PLACE,
            )


def _packed_bytes(factor: Sequence[int], output: Sequence[int]) -> int:
    """A product's second factor in stripes, each with a row for the bias."""
    columns = output[-1]
    rows = factor[-1] * factor[-2] // columns
    return _FLOAT_BYTES * math.prod(factor[:-2]) * -(-columns // _PACKED_COLUMNS) * _PACKED_COLUMNS * (rows + 1)


def _bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _with_requests(calls: Sequence[_Call], held: set[str]) -> Iterator[Node]:
    """The calls with the blocks that they take and give back; `held` are the caller's."""
    last = {name: place for place, call in enumerate(calls) for name in (*call.inputs, call.output)}
    owners: dict[str, str] = {}
    ends: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.output in held or not call.size_bytes:
            continue
        ended = [owners[given] for given in call.inputs if given in owners and call.in_place]
        fitting = (owner for owner in ended if sizes[owner] == call.size_bytes and ends[owner] == place)
        owner = owners[call.output] = next(fitting, call.output)
        sizes[owner] = call.size_bytes
        ends[owner] = last[call.output]
    for place, call in enumerate(calls):
        name = call.output
        scratch = [(f"{name}/", call.scratch_bytes), (f"{name}/", GIVEN_BACK)] if call.scratch_bytes else []
        takes = [(name, sizes[name])] if owners.get(name) == name else []
        used = dict.fromkeys(owners[given] for given in (*call.inputs, name) if given in owners)
        gives = [(owner, GIVEN_BACK) for owner in used if ends[owner] == place]
        yield Node(inputs=call.inputs, outputs=(name,), requests=(*takes, *scratch, *gives))


_RUNS: Mapping[str, Callable[[Step], tuple[PlannedStep, MemoryPlan]]] = MappingProxyType(
    {"onnx": _run_onnx, "executorch": _run_executorch, "torch": _run_torch}
)
