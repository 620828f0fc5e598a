"""Time of a step by operator and by node."""

import json
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from step_benchmark.data import Samples
from step_benchmark.programs import ProgramStep
from step_benchmark.stepping import Start
from subfleet.protocol.programs import Program
from subfleet.protocol.silence import import_silently
from subfleet.trainers.onnx import OnnxRuntime
from subfleet.trainers.runtime import Array, CopiedPrograms, RunArrays

onnxruntime = import_silently("onnxruntime")
STEPS = 12
WARM_STEPS = 2
NODES = 20
_KERNELS = ("native_call_", "DELEGATE_CALL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One run of one node: its operator, its name with shapes, and milliseconds."""

    operator: str
    node: str
    milliseconds: float


def print_profile(program: Program, start: Start, samples: Samples, threads: int, console: Console) -> None:
    """Run some steps and print their time by operator and node."""
    manifest = program.manifest
    events = PROFILERS[manifest.target](program, start, samples, threads)
    total_ms = sum(event.milliseconds for event in events) / (STEPS - WARM_STEPS)
    title = f"{start.model.name} on {manifest.target}, {threads} thr: {total_ms:.2f} ms in the nodes of a step"
    console.print(_build_table(title, "operator", [(event.operator, event.milliseconds) for event in events], total_ms))
    console.print(
        _build_table("its slowest nodes", "node", [(event.node, event.milliseconds) for event in events], total_ms)
    )


def _build_table(title: str, kind: str, times_ms: Sequence[tuple[str, float]], total_ms: float) -> Table:
    sums_ms: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, milliseconds in times_ms:
        sums_ms[name] += milliseconds / (STEPS - WARM_STEPS)
        counts[name] += 1
    table = Table(title=title)
    table.add_column(kind, overflow="fold")
    for name in ("ms a step", "share", "runs a step"):
        table.add_column(name, justify="right")
    for name in sorted(sums_ms, key=lambda name: -sums_ms[name])[:NODES]:
        runs = counts[name] / (STEPS - WARM_STEPS)
        table.add_row(name, f"{sums_ms[name]:.3f}", f"{sums_ms[name] / max(total_ms, 1e-9):.1%}", f"{runs:g}")
    return table


def _profile_onnx(program: Program, start: Start, samples: Samples, threads: int) -> list[Event]:
    """Profile with ONNX Runtime's own profiler and the trainer's settings."""
    with tempfile.TemporaryDirectory() as folder:
        profiled: Any = _ProfilingOnnx(f"{folder}/step")
        step = ProgramStep(program, start, threads=threads, programs=OnnxRuntime(profiled, "cpu").programs(threads))
        batch = step.prepare(samples)
        for _ in range(STEPS):
            step.step(batch)
        step.finish()
        records = json.loads(Path(profiled.sessions[0].end_profiling()).read_text())
    return _read_onnx_events(records)


class _ProfilingOnnx:
    """The package `onnxruntime` with sessions that profile their runs."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.sessions: list[onnxruntime.InferenceSession] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def SessionOptions(self) -> Any:  # noqa: N802 - the package's name
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = self._prefix
        return options

    def InferenceSession(self, *arguments: Any, **named: Any) -> Any:  # noqa: N802 - likewise
        self.sessions.append(onnxruntime.InferenceSession(*arguments, **named))
        return self.sessions[-1]


def _read_onnx_events(records: Sequence[Mapping[str, object]]) -> list[Event]:
    """The kernels' times in every step after the warm-up."""
    begins_us = sorted(float(str(record["ts"])) for record in records if record.get("name") == "model_run")
    first_us = begins_us[WARM_STEPS] if len(begins_us) > WARM_STEPS else 0.0
    events = []
    for record in records:
        arguments = record.get("args")
        kernel = record.get("cat") == "Node" and str(record["name"]).endswith("_kernel_time")
        if not kernel or not isinstance(arguments, Mapping) or float(str(record["ts"])) < first_us:
            continue
        node = str(record["name"]).removesuffix("_kernel_time")
        inputs, outputs = (_format_shapes(arguments.get(f"{side}_type_shape")) for side in ("input", "output"))
        shapes = f"{inputs} -> {outputs}"
        operator = str(arguments["op_name"])
        events.append(
            Event(operator=operator, node=f"{operator} {node} {shapes}", milliseconds=float(str(record["dur"])) / 1e3)
        )
    return events


def _format_shapes(values: object) -> str:
    if not isinstance(values, Sequence):
        return ""
    return " ".join("x".join(map(str, shape)) or "-" for value in values for shape in value.values())


def _profile_executorch(program: Program, start: Start, samples: Samples, threads: int) -> list[Event]:
    """Profile with ExecuTorch's event tracer, which its Python bindings include."""
    from executorch.devtools import Inspector
    from executorch.extension.pybindings import portable_lib

    torch.set_num_threads(threads)
    portable_lib._unsafe_reset_threadpool(threads)  # noqa: SLF001 - there is no public way to say so
    body = bytes(program.body)
    module = portable_lib._load_for_executorch_from_buffer(body, enable_etdump=True)  # noqa: SLF001 - likewise

    def load(loaded: Program, _: int) -> RunArrays:
        names = [value.name for value in loaded.manifest.inputs]
        results = [value.name for value in loaded.manifest.outputs]

        def run(values: Mapping[str, Array]) -> Mapping[str, Array]:
            outputs = module.run_method("forward", [torch.from_numpy(np.array(values[name])) for name in names])
            return {name: tensor.numpy() for name, tensor in zip(results, outputs, strict=True)}

        return run

    step = ProgramStep(program, start, threads=threads, programs=CopiedPrograms(load, threads))
    batch = step.prepare(samples)
    for _ in range(STEPS):
        step.step(batch)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it complains that tensors' values are missing, which were not requested
        module.write_etdump_result_to_file(f"{folder}/events")
        blocks = Inspector(etdump_path=f"{folder}/events").event_blocks
    shapes = _read_executorch_shapes(body)
    kernels = [event for block in blocks if block.name == "Execute" for event in block.events if _is_kernel(event)]
    return [
        Event(
            operator=_name_operator(event),
            node=f"{_name_operator(event)} {shapes.get(event._instruction_id, '')}",  # noqa: SLF001 - no public name
            milliseconds=time_ms,
        )
        for event in kernels
        for time_ms in event.perf_data.raw[WARM_STEPS:]
    ]


def _is_kernel(event: Any) -> bool:
    """Whether an event is a kernel or a delegate call; the work inside a delegate is part of its call."""
    return event.perf_data is not None and not event.is_delegated_op and event.name.startswith(_KERNELS)


def _name_operator(event: Any) -> str:
    return str(event.name).removeprefix("native_call_")


def _read_executorch_shapes(body: bytes) -> dict[int, str]:
    """The number and the tensor shapes of each instruction."""
    from executorch.exir._serialize import _deserialize_pte_binary
    from executorch.exir.schema import DelegateCall, KernelCall, Tensor

    plan = _deserialize_pte_binary(body).program.execution_plan[0]
    shapes = {}
    for number, instruction in enumerate(plan.chains[0].instructions):
        call = instruction.instr_args
        if isinstance(call, KernelCall | DelegateCall):
            values = [plan.values[index].val for index in call.args]
            sizes = ["x".join(map(str, value.sizes)) or "-" for value in values if isinstance(value, Tensor)]
            shapes[number] = f"#{number} {' '.join(sizes)}"
    return shapes


PROFILERS: Mapping[str, Callable[[Program, Start, Samples, int], list[Event]]] = MappingProxyType(
    {"onnx": _profile_onnx, "executorch": _profile_executorch}
)
