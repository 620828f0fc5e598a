"""The trial of a runtime: it is loaded, and trains a small program that the package ships."""

import json
import math
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from subfleet.device.runtimes import load_trainer
from subfleet.protocol.errors import BrokenError, SubfleetError
from subfleet.protocol.jobs import Job, Trainer
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings

TARGETS = ("onnx", "executorch")
"""Whose programs the package ships (`scripts/make_trial_programs.py`); other runtimes are loaded, and no more."""
DATA, WEIGHTS, EXPECTED = "data.npz", "weights.safetensors", "expected.json"
SETTINGS = TrainingSettings(batch_size=4, learning_rate=0.5)
_MEMORY_LIMIT_BYTES = 2**40
"""None: a trial is about whether the runtime works, and its program takes kilobytes."""
_TOLERANCE = 1e-3
"""Relative tolerance of the loss: kernels round differently, and broken ones are far off."""


def name_program_file(target: str) -> str:
    """Name the file of a target's program in the folder of trials."""
    return f"{target}.program"


def make_trial_job(folder: Path, target: str, output_path: Path) -> Job[Train]:
    """Make a job of two training steps with the files in a folder."""
    return Job(
        work=Train(settings=SETTINGS),
        program_path=folder / name_program_file(target),
        weights_path=folder / WEIGHTS,
        output_path=output_path,
        data=str(folder / DATA),
        round=1,
        client_id="trial",
        memory_limit_bytes=_MEMORY_LIMIT_BYTES,
    )


def run_runtime(name: str, provider: str, work: Path, begin: Callable[[str], None]) -> str:
    """Load a runtime, train with it, and return its description.

    Args:
        name: of its trainer's entry point.
        provider: what is to compute.
        work: a folder to write to.
        begin: called with the stage as it begins.

    Raises:
        SubfleetError: it is not installed, or does not work.
    """
    trainer = load_trainer(name, provider)
    text = trainer.describe_runtime()
    folder = resources.files("subfleet.device") / "trial_files"
    if (folder / name_program_file(trainer.target)).is_file():
        begin("trained with")
        with resources.as_file(folder) as path:
            _train(trainer, path, work)
    return text


def _train(trainer: Trainer, folder: Path, work: Path) -> None:
    expected = json.loads((folder / EXPECTED).read_text(encoding="utf-8"))["loss"]
    try:
        result = trainer.train(make_trial_job(folder, trainer.target, work / "update"), lambda: False)
    except SubfleetError as error:
        what = str(error).partition("; ")[0]  # what to do about a program helps nobody against a runtime
        raise BrokenError(f"training with it failed: {what}; install another build of it") from error
    if not math.isclose(result.loss, expected, rel_tol=_TOLERANCE):
        raise BrokenError(
            f"two training steps gave a loss of {result.loss:.6g} instead of {expected:.6g}: this build computes wrong "
            "results; install another one"
        )
