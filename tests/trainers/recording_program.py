"""A training program in NumPy that takes every role and records its inputs: a mean, learnt by its gradient.

The weight follows the mean of the samples, plus terms of the other inputs, so that every number that a trainer feeds
affects the results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.arrays import encode_arrays
from subfleet.protocol.jobs import Job
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import Program, ProgramManifest, ValueInfo, encode_program
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
from subfleet.tasks import Dataset, write_npz
from subfleet.trainers.runtime import RunArrays

Array = npt.NDArray[np.generic]
TOKENS = 3
CLASSES = 5
VOCABULARY = 7
WEIGHTS: Mapping[str, Array] = {"w": np.array([1.0, 2.0], np.float32), "mean": np.array([0.5], np.float32)}


def manifest(batch_size: int, *, accumulate: bool = False, name: str = "recording") -> ProgramManifest:
    def value(name: str, role: str, shape: tuple[int, ...] = (), tensor: str = "", dtype: str = "F32") -> ValueInfo:
        return ValueInfo(name=name, role=role, shape=shape, tensor=tensor, dtype=dtype)  # type: ignore[arg-type] # a literal

    tokens = replace(value("tokens", "input", (batch_size, TOKENS), dtype="I64"), limit=VOCABULARY)
    carried = [
        ("w", "parameter", (2,), "w"),
        ("mean", "buffer", (1,), "mean"),
        ("steps", "optimiser_state", (), ""),
        ("velocity", "optimiser_state", (2,), "w"),
        *([("sum", "gradient", (2,), "w")] if accumulate else []),
    ]
    return ProgramManifest(
        program_id=name,
        target="recording",
        purpose="train",
        batch_size=batch_size,
        inputs=(
            tokens,
            value("labels", "label", (batch_size, TOKENS), dtype="I64"),
            value("mask", "sample_mask", (batch_size,)),
            value("rate", "learning_rate"),
            value("random.0", "random", (batch_size, 4)),
            value("random.1", "random", (2,)),
            value("classes", "class_mask", (CLASSES,)),
            value("proximal_mu", "coefficient"),
            value("distillation_weight", "coefficient"),
            value("first", "anchor", (2,), "w"),
            *((value("weight", "batch_weight"), value("apply", "apply")) if accumulate else ()),
            *(value(*fields) for fields in carried),
        ),
        outputs=(
            value("loss", "loss"),
            value("correct", "correct"),
            value("count", "count"),
            *(value(f"new.{name}", role, shape, tensor) for name, role, shape, tensor in reversed(carried)),
        ),
        memory=MemoryPlan(runtime_bytes=1),
        max_abs_diff=0.0,
    )


@dataclass
class Recorder:
    """Loads the program and records the inputs of every run."""

    loads: list[int] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def load(self, program: Program, threads: int) -> RunArrays:
        self.loads.append(threads)
        accumulate = any(value.role == "gradient" for value in program.manifest.inputs)

        def run(values: Mapping[str, Array]) -> Mapping[str, Array]:
            self.runs.append({name: array.copy() for name, array in values.items()})
            return step({name: np.asarray(array, np.float64) for name, array in values.items()}, accumulate=accumulate)

        return run


def step(values: Mapping[str, npt.NDArray[np.float64]], *, accumulate: bool) -> dict[str, Array]:
    counted = (values["labels"] >= 0) * values["mask"][:, None]
    count = counted.sum()
    weight = values["weight"] if accumulate else count
    seen = (values["tokens"] * counted).sum() / weight
    target = (values["labels"] * counted).sum() / weight
    gradient = np.stack([values["w"][0] * count / weight - seen, values["w"][1] * count / weight - target])
    gradient = gradient + (values["sum"] if accumulate else 0)
    apply = values["apply"] if accumulate else np.float64(1)
    pulled = gradient + values["proximal_mu"] * (values["w"] - values["first"])
    velocity = values["velocity"] + apply * (pulled - 0.5 * values["velocity"])
    new = {
        "new.w": values["w"] - apply * values["rate"] * velocity,
        "new.mean": 0.5 * values["mean"] + 0.5 * seen,
        "new.steps": values["steps"] + apply,
        "new.velocity": velocity,
        "loss": seen,
        "correct": ((values["labels"] == 1) * counted).sum(),
        "count": count,
    }
    if accumulate:
        new["new.sum"] = (1 - apply) * gradient
    return {name: np.asarray(array, np.float32) for name, array in new.items()}


def texts(count: int, *, longest: int = TOKENS) -> Dataset:
    """Random tokens and labels; texts that are shorter than `TOKENS` end without labels."""
    generator = np.random.default_rng(3)
    inputs = generator.integers(0, VOCABULARY, (count, TOKENS))
    labels = generator.integers(0, CLASSES - 1, (count, TOKENS))
    for row in range(count):
        labels[row, 1 + (row + longest) % TOKENS :] = -1
    return Dataset(inputs=inputs, labels=labels)


def write_recording_job(
    folder: Path, dataset: Dataset, settings: TrainingSettings, *, batch_size: int = 0, accumulate: bool = False
) -> Job[Train]:
    plain = manifest(batch_size or settings.batch_size, accumulate=accumulate)
    write_npz(folder / "data.npz", dataset)
    (folder / "program").write_bytes(encode_program(Program(manifest=plain, body=b"-")))
    (folder / "weights").write_bytes(encode_arrays(WEIGHTS))
    return Job(
        work=Train(settings=settings),
        program_path=folder / "program",
        weights_path=folder / "weights",
        output_path=folder / "update",
        data=str(folder / "data.npz"),
        round=3,
        client_id="device-1",
        memory_limit_bytes=2**30,
        threads=2,
    )
