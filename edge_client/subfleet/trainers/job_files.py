"""The files of a job: program, weights and output."""

import errno
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from subfleet.arrays import Arrays, decode_arrays, numpy_dtype, split_arrays
from subfleet.arrays.codecs import draw_rounding_numbers, encode_changes
from subfleet.protocol.disks import hash_file, write_atomically
from subfleet.protocol.errors import DivergedError, FileError, NoRoomError, ProtocolError
from subfleet.protocol.jobs import Job
from subfleet.protocol.programs import Program, ValueInfo, decode_program
from subfleet.protocol.task import Train

_FULL = (errno.ENOSPC, errno.EDQUOT)


def hash_program(path: Path) -> str:
    """Compute the SHA-256 of a packed program.

    Raises:
        FileError: the file cannot be read.
    """
    try:
        return hash_file(path)
    except OSError as error:
        raise _make_error(path, error) from error


def read_program(path: Path, target: str) -> Program:
    """Read a packed program.

    Raises:
        FileError: the file cannot be read.
        ProtocolError: it is not a packed program, or it is for another runtime.
    """
    program = decode_program(_read(path))
    if program.manifest.target != target:
        raise ProtocolError(f"the program's target is {program.manifest.target!r:.80}, but must be {target!r}")
    return program


def read_weights(paths: Iterable[Path], values: Iterable[ValueInfo]) -> Arrays:
    """Read the weights and buffers that a program takes, by tensor name; they are read-only.

    Args:
        paths: containers, which together have exactly the program's tensors.
        values: what the program takes.

    Raises:
        FileError: the file cannot be read.
        ProtocolError: it is not a container, or its tensors are not exactly the program's.
    """
    weights: Arrays = {}
    for path in paths:
        own = decode_arrays(_read(path))
        if twice := sorted(own.keys() & weights.keys()):
            raise ProtocolError(f"tensor {twice[0]!r:.80} is in two containers of a task, but must be in one")
        weights = {**weights, **own}
    expected = {value.tensor: value for value in values}
    if set(weights) != set(expected):
        odd = sorted(set(weights) ^ set(expected))
        raise ProtocolError(
            f"the weights and the program must name the same tensors, but {len(odd)} differ, first {odd[0]!r:.80}"
        )
    for name, value in expected.items():
        array = weights[name]
        if array.shape != value.shape or array.dtype != numpy_dtype(value.dtype):
            raise ProtocolError(
                f"tensor {name!r:.80} of the weights is {array.dtype} of shape {array.shape}, but the program takes "
                f"{value.dtype} of shape {value.shape}"
            )
    return weights


def write_change(job: Job[Train], changed: Arrays, *, exact: Collection[str] = ()) -> None:
    """Write the change of a training as a container, encoded by the job's codec, atomically.

    Args:
        job: its output file is written.
        changed: the trained values, by tensor.
        exact: names of tensors that are not weights; they are never encoded.

    Raises:
        DivergedError: a value is not finite; such an update would destroy the model.
        ProtocolError: the job asks for a tensor that its program lacks.
        FileError: the file cannot be written.
    """
    work = job.work
    if odd := sorted(set(work.sends) - changed.keys()):
        raise ProtocolError(f"the task asks for the change of {odd[0]!r:.120}, but its program has no such tensor")
    changed = {name: changed[name] for name in work.sends or changed}
    for name, array in changed.items():
        if not np.isfinite(array).all():
            raise DivergedError(f"tensor {name!r:.80} is not finite after training; lower the learning rate")
    uniform = partial(draw_rounding_numbers, seed=work.settings.seed, round_number=job.round, client_id=job.client_id)
    write_arrays(job.output_path, encode_changes(work.update_codec, changed, exact=exact, uniform=uniform))


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write a container atomically.

    Raises:
        NoRoomError: the disk is full.
        FileError: the file cannot be written.
    """
    try:
        write_atomically(path, split_arrays(arrays))
    except OSError as error:
        kind = NoRoomError if error.errno in _FULL else FileError
        raise kind(
            f"the update {str(path)!r} cannot be written ({error.strerror}); check the folder and its free space"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _make_error(path, error) from error


def _make_error(path: Path, error: OSError) -> FileError:
    return FileError(f"file {str(path)!r} cannot be read ({error.strerror}); it must be fetched again")
