"""A process that exports: jobs on standard input, answers on standard output, one JSON line each.

It ends as soon as its input does, so it never outlives the process that started it.
"""

import gc
import hashlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

from subfleet.elastic.families.records.residual import Mlp
from subfleet.export.cache import is_whole, lock_result
from subfleet.export.jobs import MAX_LINE_BYTES, TAKEN_LINE, ExportJob, figure_path, write_atomically
from subfleet.export.requests import EstimateRequest, EvaluateRequest, InferRequest, TrainRequest
from subfleet.export.tools import pause_garbage_collection
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError, SubfleetError
from subfleet.protocol.programs import encode_program
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.silence import silence
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings


def run_job(job: ExportJob) -> None:
    """Export one program, model or set of cost estimates into its file, unless another process has already done so.

    Raises:
        SubfleetError: it cannot be exported, or differs from PyTorch.
    """
    path = Path(job.result_path)
    with lock_result(path):
        if not is_whole(path, job.request):
            _export(job, path)


@pause_garbage_collection()
def _export(job: ExportJob, path: Path) -> None:
    from subfleet.export.programs import export_program

    if isinstance(job.request, TrainRequest | EvaluateRequest):
        content = encode_program(export_program(job.request))
    elif isinstance(job.request, EstimateRequest):
        from subfleet.elastic.building import network_of
        from subfleet.export.estimation.model import EstimateModel

        training = job.request.training
        content = EstimateModel(network_of(training.model), training).estimates.pack()
    else:
        content, figures = _export_model(job, job.request)
        # Written first: a model file always has its figures beside it.
        write_atomically(figure_path(path), canonical_json(figures))
    write_atomically(path, content)


def _export_model(job: ExportJob, request: InferRequest) -> tuple[bytes, dict[str, object]]:
    """Export an inference model; return it with its figures."""
    from safetensors.torch import load

    from subfleet.export.programs import export_inference_model
    from subfleet.export.quantisation.models import export_quantised_model, samples_of
    from subfleet.tasks import DataForm, read_dataset

    try:
        weights = Path(job.weights_path).read_bytes()
    except OSError as error:
        raise ExportError(f"the weights in {job.weights_path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(weights).hexdigest() != request.weights_sha256:
        raise ExportError(f"the weights in {job.weights_path} differ from those of the request; write them again")
    if request.quantisation == "none":
        body, max_abs_diff = export_inference_model(request, load(weights))
        return body, {"max_abs_diff": max_abs_diff}
    model = request.model
    form = DataForm(
        input_shape=model.input_shape,
        class_count=model.class_count,
        classes=request.classes,
        transform=request.transform,
    )
    samples = samples_of(read_dataset(job.samples_from, form))
    body, report = export_quantised_model(request, load(weights), samples)
    return body, {"quantisation": report}


def _handle(line: str) -> str:
    """Run a job; return the error, which is empty if it succeeded."""
    try:
        run_job(from_plain(ExportJob, parse_json(line.encode(), max_bytes=MAX_LINE_BYTES)))
    except SubfleetError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a tool raises concerns only this job
        return f"the exporter failed with {type(error).__name__}: {error}; report it with the request"
    return ""


def warm_up(is_idle: Callable[[], bool]) -> None:
    """Import the tools and let them build their tables, target by target, while there are no jobs."""
    from subfleet.export.programs import export_program

    model = Mlp(input_shape=(4,), class_count=2, widths=(4,), depths=(1,))
    for target in TARGET_NAMES:
        if is_idle():
            export_program(
                TrainRequest(
                    model=model,
                    architecture=Architecture(),
                    target=target,
                    batch_size=2,
                    objective=ObjectiveSettings(),
                    optimiser=OptimiserSettings(),
                )
            )


@pause_garbage_collection()
def _load_tools(is_idle: Callable[[], bool]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        warm_up(is_idle)
    except SubfleetError:
        sys.stderr.write("warming up failed; the first request will report the reason\n")
    gc.freeze()  # the tools' million objects stay


def _read_jobs(lines: TextIO, answers: BinaryIO, jobs: "queue.SimpleQueue[str]") -> None:
    for line in lines:
        answers.write(TAKEN_LINE)
        jobs.put(line)
    os._exit(0)  # the pool is gone, so nobody waits for the export


def main() -> None:
    """Serve jobs until the input ends."""
    silence(os.environ)  # also if another program has started this one
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of the tools goes to the log, not between the answers
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(sys.stdin, answers, jobs), daemon=True).start()
    _load_tools(jobs.empty)
    while True:
        answer = _handle(jobs.get())
        answers.write(canonical_json(answer) + b"\n")


if __name__ == "__main__":
    main()
