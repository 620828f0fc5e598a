"""Messages between the pool and its worker processes, one JSON line each way; nothing is pickled."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from subfleet.export.requests import AnyRequest

MAX_LINE_BYTES = 2**20
TAKEN_LINE = b"taken\n"
"""A worker's reply when it receives a job: if it ends before that, its end has nothing to do with the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """One export.

    Attributes:
        request: what to export.
        result_path: the file to write.
        weights_path: a safetensors file with the submodel's own tensors, for an inference model.
        samples_from: the data set for an 8-bit model, as `subfleet.tasks.read_dataset` takes it.
    """

    request: AnyRequest
    result_path: str
    weights_path: str = ""
    samples_from: str = ""


def figure_path(model_path: Path) -> Path:
    """Return the path of the JSON file beside an inference model that holds its `max_abs_diff`."""
    return model_path.with_name(f"{model_path.name}.json")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is complete or absent, whenever the machine stops."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
