"""Trains and predicts with stock ONNX Runtime, on the CPU or with its CUDA provider. Needs no PyTorch and no `onnx`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import numpy as np

from subfleet.protocol.errors import ConfigError, MissingExtraError, TrainingError
from subfleet.protocol.loading import unloadable
from subfleet.protocol.programs import (
    DataSummary,
    EvaluateJob,
    EvaluationResult,
    Prediction,
    Program,
    ScoreJob,
    TrainJob,
    TrainResult,
)
from subfleet.protocol.silence import imported
from subfleet.tasks import describe_source
from subfleet.trainers.chain_evaluating import evaluate_paths
from subfleet.trainers.chain_training import train_chain
from subfleet.trainers.evaluating import evaluate_job
from subfleet.trainers.kept import Host, Slot
from subfleet.trainers.library_pages import map_library
from subfleet.trainers.onnx_pieces import OnnxPieces, share_arena
from subfleet.trainers.onnx_references import check_self_contained
from subfleet.trainers.onnx_session import OnnxSession, guarded
from subfleet.trainers.prediction import FREE_BATCH_SIZE, model_form, predict_dataset, read_model
from subfleet.trainers.scoring import score_job
from subfleet.trainers.sessions import Array, SessionLayout, StepSession
from subfleet.trainers.training import train_job

__all__ = ["OnnxTrainer"]

_ERRORS_ONLY = 3
# The smallest model there is: one Identity from "x" to "y", float32 of shape (1,), opset 13, IR version 8.
_IDENTITY = (
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01wZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
# Weights in files beside a model would be read from this folder, and there is none; no such model gets so far.
_NO_FOLDER = "/nonexistent"
_PROVIDERS: Mapping[str, str] = MappingProxyType({"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"})
_INPUT_TYPES: Mapping[str, str] = MappingProxyType({"float32": "tensor(float)", "int64": "tensor(int64)"})


class OnnxTrainer:
    """The trainer of programs and models in the ONNX format.

    Args:
        provider: what computes: "cpu", or "cuda" with a build of ONNX Runtime that has it.
        host: the process that it trains in; without one, a device's own.
    """

    target: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"
    providers: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def __init__(self, provider: str = "cpu", host: Host | None = None) -> None:
        self._provider = provider
        self._host = Slot() if host is None else host
        self._runtime: ModuleType | None = None

    @property
    def held_bytes(self) -> int:
        """Memory that the session kept for the next job holds."""
        return self._host.held_bytes

    def describe_runtime(self) -> str:
        """See `Trainer.describe_runtime`."""
        runtime = self._prepared()
        return f"ONNX Runtime {runtime.__version__} with {', '.join(runtime.get_available_providers())}"

    def describe(self, data: str) -> DataSummary:
        """Summarise a data set; see `describe_source` for what it raises.

        The runtime is loaded here too, so that the memory that is free from now on is what training can really have.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
            ConfigError: it has no such provider, or the provider does not work.
        """
        self._prepared()
        return describe_source(data)

    def train(self, job: TrainJob, stopped: Callable[[], bool]) -> TrainResult:
        """Train; see `train_job`, and for jobs with paths `train_chain`, for what it does and raises.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
            ConfigError: it has no such provider, or the provider does not work.
        """
        # Before anything is measured: the library is there whatever subnet is trained.
        runtime = self._prepared()
        if job.paths is not None:
            open_pieces = partial(_open_pieces, runtime, self._provider)
            return train_chain(job, stopped, target=self.target, open_pieces=open_pieces, slot=self._host)
        open_session = partial(_open, runtime, self._provider)
        return train_job(job, stopped, target=self.target, open_session=open_session, slot=self._host)

    def score(self, job: ScoreJob, stopped: Callable[[], bool]) -> float:
        """Score a candidate; see `score_job` for what it does and raises.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
            ConfigError: it has no such provider, or the provider does not work.
        """
        runtime = self._prepared()
        open_session = partial(_open, runtime, self._provider)
        return score_job(job, stopped, target=self.target, open_session=open_session, slot=self._host)

    def evaluate(self, job: EvaluateJob, stopped: Callable[[], bool]) -> EvaluationResult:
        """Evaluate a model, or the paths of a population; see `evaluate_job` and `evaluate_paths` for what that raises.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
            ConfigError: it has no such provider, or the provider does not work.
        """
        runtime = self._prepared()
        if job.settings.population:
            open_pieces = partial(_open_pieces, runtime, self._provider)
            return evaluate_paths(job, stopped, target=self.target, open_pieces=open_pieces, slot=self._host)
        open_session = partial(_open, runtime, self._provider)
        return evaluate_job(job, stopped, target=self.target, open_session=open_session, slot=self._host)

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        """Run a model with one input, (batch, *sample shape), whose first output is the logits.

        Raises:
            MissingExtraError: ONNX Runtime is not installed.
            ConfigError: it has no such provider, or the provider does not work.
            FileError: model or data cannot be read.
            DataError: the data do not fit the model.
            TrainingError: ONNX Runtime refuses the model.
        """
        session = _session(self._prepared(), read_model(model_path), threads, self._provider)
        inputs = session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in _INPUT_TYPES.values() or not _takes_samples(inputs[0].shape):
            raise TrainingError(
                f"model {str(model_path)!r} must have one input of shape (batch, *sample shape), and only the batch "
                "may be open"
            )
        name = inputs[0].name
        batch, *sample_shape = inputs[0].shape
        output = session.get_outputs()[0].name
        notes = session.get_modelmeta().custom_metadata_map
        dtype = next(dtype for dtype, kind in _INPUT_TYPES.items() if kind == inputs[0].type)
        form = model_form(model_path, lambda name: notes.get(name, ""), sample_shape=tuple(sample_shape), dtype=dtype)

        def infer(samples: Array) -> Array:
            return np.asarray(guarded(lambda: session.run([output], {name: samples}))[0])

        batch_size = batch if isinstance(batch, int) else FREE_BATCH_SIZE
        return predict_dataset(infer, form.data(data), batch_size=batch_size, form=form)

    def _prepared(self) -> ModuleType:
        if self._runtime is None:
            self._runtime = _prepare(self._provider)
        return self._runtime


def _open(runtime: ModuleType, provider: str, program: Program, layout: SessionLayout, threads: int) -> StepSession:
    writers = ", ".join(f"{tool} {version}" for tool, version in sorted(program.manifest.versions.items()))
    session = _session(runtime, program.body, threads, provider, writers)
    return OnnxSession(runtime, session, program.manifest, layout, device=provider)


def _open_pieces(runtime: ModuleType, provider: str, threads: int) -> OnnxPieces:
    share_arena(runtime)

    def open_session(model: bytes | memoryview, writers: str) -> Any:
        return _session(runtime, model, threads, provider, writers, shares_arena=True)

    return OnnxPieces(runtime, open_session, _IDENTITY)


def _prepare(provider: str) -> ModuleType:
    """Import ONNX Runtime and make it load what it loads only once, so that no single training is charged with it."""
    try:
        onnxruntime = imported("onnxruntime")
    except ModuleNotFoundError as error:
        raise MissingExtraError("onnxruntime", "edge") from error
    except Exception as error:  # a build for another NumPy raises whatever it comes upon
        raise unloadable("onnxruntime", error) from error
    needed = _PROVIDERS[provider]
    available = onnxruntime.get_available_providers()
    if needed in available:
        try:
            session = _session(onnxruntime, _IDENTITY, 1, provider)
        except TrainingError as error:
            raise ConfigError(f"the provider {provider!r} does not work here: {error}") from error
        session.run(None, {"x": np.zeros(1, np.float32)})
        # A provider whose libraries are missing is left out with no more than a line in a log.
        available = session.get_providers()
    if needed not in available:
        raise ConfigError(
            f"the provider {provider!r} needs {needed}, but ONNX Runtime {onnxruntime.__version__} works with "
            f"{available} here; install a build that has it (onnxruntime-gpu, on Jetson NVIDIA's own) and its "
            "libraries, or leave --provider out"
        )
    map_library(Path(onnxruntime.__file__).parent)
    module: ModuleType = onnxruntime
    return module


def _takes_samples(shape: Sequence[object]) -> bool:
    """Whether an input's shape is (batch, *sample shape); its batch may be a name instead of a number."""
    return len(shape) >= 2 and all(isinstance(size, int) for size in shape[1:])


def _session(
    runtime: ModuleType,
    model: bytes | memoryview,
    threads: int,
    provider: str = "cpu",
    writers: str = "",
    *,
    shares_arena: bool = False,
) -> Any:
    """One session for one program, by itself its memory can be measured and is given back with it.

    Where it shares the process's arena, that is so for all that share it.
    """
    check_self_contained(model)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # The arena belongs to the session and goes with it; it fits freed blocks tightly, where planned patterns set memory
    # aside for a whole run. Measured on two residual blocks: 26 MB; with patterns 46 MB; without the arena 34 to 58 MB.
    # Planned reuse keeps the block of a dead tensor for a later one of its shape, so that no other may have it: 33 MB
    # with it, 26 MB without. The exporter plans with these settings (`subfleet.export.memory.onnx_run`).
    options.enable_cpu_mem_arena = True
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    # Threads that wait for work by spinning drain batteries; but to wake one for each operator of a step takes up to a
    # third of the step. So they spin inside a step alone.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.load_model_format", "ONNX")  # what was checked is what is read
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _NO_FOLDER)
    if shares_arena:
        options.add_session_config_entry("session.use_env_allocators", "1")
    providers = [_PROVIDERS[provider]]
    what = f"ONNX Runtime {runtime.__version__} refused the program{f' that {writers} wrote' if writers else ''}"
    return guarded(lambda: runtime.InferenceSession(bytes(model), options, providers=providers), what)
