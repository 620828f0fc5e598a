"""Exported programs: written by the exporter, run by the trainer's own sessions, found again in the cache."""

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from step_benchmark.data import Samples
from step_benchmark.stepping import Start, Weights
from step_benchmark.zoo import ZooModel, build_seeded
from subfleet.elastic.families.records.residual import Mlp
from subfleet.export.cache import CacheFolder, ExportCache
from subfleet.export.programs import write_program
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import SampleSpec, training_step
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings
from subfleet.trainers.executorch import load_executorch
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.onnx import load_onnx
from subfleet.trainers.program_layout import list_stages, read_layout
from subfleet.trainers.program_session import ProgramSession
from subfleet.trainers.runtime import Programs, Runtime

Array = npt.NDArray[np.generic]
TARGETS = ("onnx", "executorch")
LOOKUPS = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedProgram:
    """A written program and its export time."""

    program: Program
    export_s: float


def export(model: ZooModel, target: str, optimiser: OptimiserSettings) -> ExportedProgram:
    """Write a model's training program; raises ExportError if it cannot be written."""
    module = build_seeded(model, 0).train()
    sample = SampleSpec(shape=model.sample_shape, dtype=model.sample_dtype, limit=model.sample_limit)
    objective = ObjectiveSettings(name=model.objective)
    started_s = time.perf_counter()
    step = training_step(module, sample, batch_size=model.batch_size, objective=objective, optimiser=optimiser)
    program = write_program(step, target=target, program_id=f"zoo-{model.name}")
    return ExportedProgram(program=program, export_s=time.perf_counter() - started_s)


def measure_lookup_ms(program: Program) -> tuple[float, float]:
    """Milliseconds to find a program in a newly opened cache, and in an open one.

    Both know the request's content id; a newly opened cache also reads the file once, to check that it is complete.
    """
    request = TrainRequest(
        model=Mlp(input_shape=(2,), class_count=2, widths=(4,), depths=(1,)),
        architecture=Architecture(),
        target=program.manifest.target,
        batch_size=1,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(),
    )
    with tempfile.TemporaryDirectory() as folder:
        named = replace(program, manifest=replace(program.manifest, program_id=request.program_id))
        cache = ExportCache(CacheFolder(path=Path(folder)))
        cache.path(request).write_bytes(encode_program(named))
        times_ms = []
        for _ in range(LOOKUPS):
            started_s = time.perf_counter()
            if cache.find(replace(request)) is None:
                raise SystemExit("the cache does not find the program that was just put into it")
            times_ms.append((time.perf_counter() - started_s) * 1e3)
    return times_ms[0], statistics.median(times_ms[1:])


def load_runtime(target: str) -> Runtime:
    """Load the runtime of a device's trainer, with the trainer's settings."""
    return load_onnx("cpu") if target == "onnx" else load_executorch()


class ProgramStep:
    """A loaded program with its carried tensors, run as by a device's trainer. See `Stepper`."""

    def __init__(self, program: Program, start: Start, *, threads: int, programs: Programs | None = None) -> None:
        target = program.manifest.target
        programs = load_runtime(target).programs(threads) if programs is None else programs
        whole = read_layout(program.manifest)
        load = programs.open(program)
        self._layout = whole.for_training
        self._loaded = Loaded(
            sha256="",
            target=target,
            threads=threads,
            layout=whole,
            programs=programs,
            runs={name: load(name) for name in whole.programs},
        )
        self._path = tuple(list_stages(whole.chain.links))
        self._weights = {value.tensor: start.state[value.tensor].numpy() for value in self._layout.stored}
        self._constants: dict[str, Array] = {self._layout.learning_rate.name: np.array(start.learning_rate, np.float32)}
        self.begin()

    def begin(self) -> None:
        """Restart from the first weights."""
        self._session = ProgramSession(self._loaded, self._loaded.layout.chain.links, self._weights, self._constants)

    def prepare(self, samples: Samples) -> dict[str, Array]:
        """A batch as the program takes it: smaller ones are padded with their first sample, and masked."""
        layout, real = self._layout, len(samples.labels)
        padded = np.r_[np.arange(real), np.zeros(layout.batch_size - real, np.int64)]
        mask = (np.arange(layout.batch_size) < real).astype(np.float32)
        return {
            layout.input.name: np.ascontiguousarray(samples.inputs[padded]),
            layout.label.name: np.ascontiguousarray(samples.labels[padded]),
            layout.sample_mask.name: mask,
        }

    def step(self, batch: Mapping[str, Array]) -> float:
        """Take one step, and return the loss before it."""
        return float(self._session.step(self._path, batch)[self._layout.loss])

    def finish(self) -> Weights:
        """Return parameters and floating-point buffers."""
        tensors = self._session.finish()
        return {
            value.tensor: np.array(tensors[value.tensor], np.float64)
            for value in self._layout.stored
            if value.dtype == "F32"
        }
