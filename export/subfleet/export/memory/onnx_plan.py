"""The memory plan of a training program in ONNX Runtime, from what the runtime makes of it.

    weights and states   twice: a step reads one set and writes the other
    activations          most bytes of the step's own tensors alive at once, in the order in which the runtime runs them
    workspace            kernels' scratch memory, and the gaps between blocks, from a simulation of the runtime's arena
    runtime              the session's objects, counted in the C library's heap; the program; a constant

`benchmarks/plan_memory.py` compares plans with what fresh processes take.
"""

from subfleet.export.memory.blocks import peak_bytes
from subfleet.export.memory.onnx_arena import simulate_arena
from subfleet.export.memory.onnx_blocks import requests_of
from subfleet.export.memory.onnx_run import run_onnx
from subfleet.export.memory.values import fed_bytes, optimiser_bytes, round_up_count, weights_bytes
from subfleet.export.steps.values import Step
from subfleet.protocol.memory import MemoryPlan

__all__ = ["FIRST_SESSION_BYTES", "TRAINING_BYTES", "VALUE_BYTES", "plan_onnx"]

TRAINING_BYTES = 500_000
"""Python's objects of a training, and pages of libraries that the first step maps. No second batch: what a step was fed
is gone before the next is made."""
FIRST_SESSION_BYTES = 45_000
"""What a process takes with its first session for all later ones; a device has one only. Measured: 36 to 48 kB."""
VALUE_BYTES = 1_800
"""Objects for each input and output. Measured, together with the above: 0.6 MB (31 values) to 1.4 MB (299 values)."""


def plan_onnx(body: bytes, step: Step) -> MemoryPlan:
    """Plan a program by loading it and running it once.

    Raises:
        ExportError: the runtime's report of the run cannot be read.
    """
    graph = run_onnx(body, step.inputs)
    requests = list(requests_of(graph))
    activation = peak_bytes(
        request for request in requests if request[0] in graph.types
    )  # without kernels' scratch memory
    value_count = len(step.inputs) + len(step.outputs)
    return MemoryPlan(
        weights_bytes=weights_bytes(step),
        optimiser_bytes=optimiser_bytes(step),
        fed_bytes=fed_bytes(step),
        activation_bytes=activation,
        workspace_bytes=max(simulate_arena(requests).resident_bytes - activation, 0),
        runtime_bytes=round_up_count(graph.session_bytes)
        + len(body)
        + FIRST_SESSION_BYTES
        + TRAINING_BYTES
        + VALUE_BYTES * value_count,
    )
