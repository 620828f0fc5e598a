"""Data sets in `.npz` files, and the conversion of a pair of arrays into a data set."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError, FileError, ProtocolError, explain_os_errors
from subfleet.protocol.transform import DATA_TRANSFORM, format_transform, parse_transform
from subfleet.tasks.dataset import Dataset, Inputs, Labels
from subfleet.tasks.pictures import MAX_BYTE

_NAMES = (("x", "y"), ("inputs", "labels"))
_OWNERS = "owners"
_CLASS_NAMES = "class_names"
_LAYOUT = "layout"
_EXACT = "exact"
_CHANNEL_COUNTS = (1, 3, 4)


def make_dataset(
    inputs: npt.ArrayLike,
    labels: npt.ArrayLike,
    source: str,
    *,
    owners: npt.ArrayLike | None = None,
    class_names: npt.ArrayLike | None = None,
    exact: bool = False,
) -> Dataset:
    """Make a data set from two arrays.

    Args:
        inputs: (samples, ...); uint8 (scaled by 1/255), floating point, or wider integers, which are indices such as
            tokens.
        labels: (samples, ...); integers are class indices, floating point numbers are targets. A class index for each
            sample may also have the shape (samples, 1).
        source: name of the data in error messages.
        owners: integers, (samples,): the owner of each sample, or -1 for none.
        class_names: strings, (classes,), in the order of the class indices.
        exact: keep the shape; otherwise numbers of shape (samples, height, width[, channels]) become images with
            channels first.

    Raises:
        DataError: the arrays cannot be used.
    """
    try:
        x, y = np.asarray(inputs), np.asarray(labels)
        owner_indices = None if owners is None else _convert_owners(np.asarray(owners))
        names = () if class_names is None else _convert_class_names(np.asarray(class_names))
        if x.dtype != np.uint8 and np.issubdtype(x.dtype, np.integer):
            samples: Inputs = _convert_indices(x, "inputs")
        else:
            values = _scale(x)
            samples = np.ascontiguousarray(values if exact else _move_channels_first(values))
        return Dataset(inputs=samples, labels=_convert_labels(y, exact=exact), owners=owner_indices, class_names=names)
    except DataError as error:
        raise DataError(f"data source {source!r}: {error}") from error
    except (ValueError, MemoryError) as error:
        raise DataError(f"data source {source!r} contains arrays that cannot be used ({error})") from error


def read_npz(path: Path) -> Dataset:
    """Read `x` and `y`, or `inputs` and `labels`, and optionally `owners`, from an `.npz` file. Nothing is unpickled.

    Raises:
        FileError: the file is missing or cannot be opened.
        DataError: it is not an `.npz` file, lacks the arrays, or they cannot be used.
    """
    with explain_os_errors(f"data file {str(path)!r} cannot be opened", "check the path"):
        file = path.open("rb")
    try:
        with file, np.load(file, allow_pickle=False) as archive:
            names = _find_names(archive, path)
            exact = _LAYOUT in archive.files and str(archive[_LAYOUT]) == _EXACT
            inputs, labels = archive[names[0]], archive[names[1]]
            owners, class_names = (archive[name] if name in archive.files else None for name in (_OWNERS, _CLASS_NAMES))
            transform = parse_transform(str(archive[DATA_TRANSFORM])) if DATA_TRANSFORM in archive.files else None
    except DataError:
        raise
    except ProtocolError as error:
        raise DataError(
            f"data file {str(path)!r} was transformed in an unknown way ({error}); write it again"
        ) from error
    # Damaged files make the parsers raise almost anything; an encryption flag alone gives RuntimeError.
    except Exception as error:
        raise DataError(f"data file {str(path)!r} is not a readable .npz file ({error}); write it again") from error
    dataset = make_dataset(inputs, labels, str(path), owners=owners, class_names=class_names, exact=exact)
    return dataset if transform is None else replace(dataset, transform=transform)


def write_npz(path: Path, dataset: Dataset) -> None:
    """Write a data set so that `read_dataset` restores its arrays exactly. A crash leaves no partial file.

    Raises:
        FileError: the file cannot be written, or does not end in `.npz`.
    """
    if path.suffix != ".npz":
        raise FileError(f"data file {str(path)!r} must end in .npz, so that it can be read back")
    partial = path.with_name(f".{path.name}.partial")
    with explain_os_errors(f"data file {str(path)!r} cannot be written", "check the folder and its free space"):
        with partial.open("wb") as file:
            arrays: dict[str, Any] = {"inputs": dataset.inputs, "labels": dataset.labels, _LAYOUT: np.array(_EXACT)}
            if dataset.owners is not None:
                arrays[_OWNERS] = dataset.owners
            if dataset.class_names:
                arrays[_CLASS_NAMES] = np.array(dataset.class_names)
            if dataset.transform is not None:
                arrays[DATA_TRANSFORM] = np.array(format_transform(dataset.transform))
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def _find_names(archive: object, path: Path) -> tuple[str, str]:
    files = archive.files if isinstance(archive, np.lib.npyio.NpzFile) else []
    names = next((pair for pair in _NAMES if set(pair) <= set(files)), None)
    if names is None:
        raise DataError(f"data file {str(path)!r} contains {files}, but must contain x and y, or inputs and labels")
    return names


def _scale(inputs: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    if inputs.dtype == np.uint8:
        values = inputs.astype(np.float32)
        values /= np.float32(MAX_BYTE)
        return values
    if np.issubdtype(inputs.dtype, np.floating):
        # Values beyond float32 become infinite, and `Dataset` refuses them.
        with np.errstate(over="ignore"):
            return inputs.astype(np.float32, copy=False)
    raise DataError(
        f"inputs are {inputs.dtype}, but must be uint8 (scaled by 1/255), floating point, or wider integers as indices"
    )


def _convert_labels(labels: npt.NDArray[np.generic], *, exact: bool) -> Labels:
    if np.issubdtype(labels.dtype, np.floating):
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(labels, np.float32)
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"labels are {labels.dtype}, but must be integers (class indices from 0) or floating point (targets)"
        )
    if not exact and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    return _convert_indices(labels, "labels")


def _convert_owners(owners: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    if not np.issubdtype(owners.dtype, np.integer):
        raise DataError(f"owners are {owners.dtype}, but must be integers from 0, or -1 for no owner")
    return _convert_indices(owners, "owners")


def _convert_class_names(names: npt.NDArray[np.generic]) -> tuple[str, ...]:
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"class_names are {names.dtype} of shape {names.shape}, but must be one string for each class")
    return tuple(str(name) for name in names)


def _convert_indices(array: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.int64]:
    if array.dtype == np.uint64 and array.size and int(np.max(array)) > np.iinfo(np.int64).max:
        raise DataError(f"{name} go up to {np.max(array)}, which is not a valid index")
    return np.ascontiguousarray(array, np.int64)


def _move_channels_first(inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shape = inputs.shape
    if len(shape) == 3:
        return inputs.reshape(shape[0], 1, *shape[1:])
    if len(shape) == 4 and shape[3] in _CHANNEL_COUNTS and shape[1] not in _CHANNEL_COUNTS:
        return np.moveaxis(inputs, 3, 1)
    return inputs
