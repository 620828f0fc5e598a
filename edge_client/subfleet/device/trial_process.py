"""The child process of `subfleet.device.trials`: loads a package, or loads a runtime and trains with it.

It writes lines of JSON: the stage that it begins, and at its end one report. Whatever happens on the way, an error, an
abort or a signal, happens to this process alone.
"""

import faulthandler
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from subfleet.device.runtimes import load_trainer
from subfleet.protocol.errors import BrokenError, ConfigError, MissingExtraError, SubfleetError
from subfleet.protocol.jobs import Job, Trainer
from subfleet.protocol.loading import explain_load_error
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings

TARGETS = ("onnx", "executorch")
"""Whose programs the package ships (`scripts/make_trial_programs.py`); other runtimes are loaded, and no more."""
DATA, WEIGHTS, EXPECTED = "data.npz", "weights.safetensors", "expected.json"
SETTINGS = TrainingSettings(batch_size=4, learning_rate=0.5)
_MEMORY_LIMIT_BYTES = 2**40
"""None: a trial is about whether the runtime works, and its program takes kilobytes."""
_TOLERANCE = 1e-3
"""Relative, of the loss: kernels round in their own ways, broken ones are far off."""

Report = dict[str, str | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The context of a trial.

    Attributes:
        work: a folder to write to.
        begin: told of each stage.
    """

    work: Path
    begin: Callable[[str], None]


def main(arguments: Sequence[str]) -> None:
    """Make a trial: a folder to write to, and "package MODULE DISTRIBUTION" or "runtime NAME PROVIDER"."""
    # What libraries print must not stand between the reports.
    channel = os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable()  # says on standard error where a signal struck
    _leave_no_core()
    work, kind, first, second = arguments

    def tell(report: Mapping[str, str | bool]) -> None:
        os.write(channel, json.dumps(report).encode() + b"\n")

    tell(
        _report(lambda: _KINDS[kind](first, second, Trial(work=Path(work), begin=lambda stage: tell({"stage": stage}))))
    )
    os.close(channel)
    sys.stderr.flush()
    os._exit(0)  # a runtime that dies while it is taken down has worked


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


def _report(work: Callable[[], str]) -> Report:
    try:
        return {"text": work()}
    except (MissingExtraError, ConfigError) as error:
        return {"problem": str(error), "installed": False, "code": str(int(error.exit_code))}
    except SubfleetError as error:
        return {"problem": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a package raises is what is to be found out
        return {"problem": str(explain_load_error("", error))}


def _load_package(module: str, distribution: str, trial: Trial) -> str:
    trial.begin("loaded")
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == module.partition(".")[0]:
            raise MissingExtraError(distribution, "edge") from error
        raise explain_load_error(distribution, error) from error
    try:
        return version(distribution)
    except PackageNotFoundError:  # a system's own build may be registered by another name, or by none
        return "installed"


def _run_runtime(name: str, provider: str, trial: Trial) -> str:
    trial.begin("loaded")
    trainer = load_trainer(name, provider)
    text = trainer.describe_runtime()
    folder = resources.files("subfleet.device") / "trial_files"
    if (folder / name_program_file(trainer.target)).is_file():
        trial.begin("trained with")
        with resources.as_file(folder) as path:
            _train(trainer, path, trial.work)
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


def _leave_no_core() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


_KINDS: Mapping[str, Callable[[str, str, Trial], str]] = MappingProxyType(
    {"package": _load_package, "runtime": _run_runtime}
)
