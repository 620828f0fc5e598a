"""Data sources for `--data`: a folder of images by class, an `.npz` file, a known data set, or an entry point.

A source is chosen by the person who runs the device, never by a message.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from subfleet.protocol.errors import ConfigError, DataError, FileError, explain_os_errors
from subfleet.protocol.jobs import DataSummary
from subfleet.protocol.suggestion import suggest
from subfleet.tasks.arrays_file import make_dataset, read_npz
from subfleet.tasks.data_form import DataForm, fit_to_form
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.image_folder import describe_image_folder, read_image_folder
from subfleet.tasks.measuring import measure_inputs

_OTHERS = "a known data set's part such as digits:test, or module:function"
_PARTS = ("train", "test")
_ENTRY_POINT = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*)")


def read_dataset(source: str, form: DataForm | None = None) -> Dataset:
    """Read the data set of a source.

    Args:
        source: path of a folder with one folder of images for each class, named after it; path of an `.npz` file with
            the arrays `x` and `y` (or `inputs` and `labels`), and optionally `class_names`; a part of a known data set,
            such as `fashion_mnist:test`; or `module:function`, a function without arguments that returns the pair
            (inputs, labels). In files and pairs, uint8 inputs are scaled by 1/255, channels-last images become channels
            first, and (samples, height, width) becomes one channel; wider integers are indices, such as tokens, and
            stay unchanged. Integer labels are class indices, or -1 in texts for no label; floating point labels are
            targets.
        form: the form that a model takes, which determines the shape of samples and the index of each class; see
            `subfleet.tasks.data_form`. None leaves the data unchanged.

    Raises:
        FileError: the path is missing or cannot be read.
        DataError: the source is of no known kind, its content cannot be used, or does not fit the form.
        TransportError: a known data set must be downloaded, but its address cannot be reached.
        MissingExtraError: Pillow, needed for images, or a known data set's package is not installed.
    """
    if form is None:
        return _read(source, None)
    return fit_to_form(_read(source, form), form, source)


def describe_source(source: str) -> DataSummary:
    """Describe a data set as far as a device may report it, before a model is known; for errors see `read_dataset`.

    Pictures of a folder may differ in size, because the run's transform may resize them.
    """
    path = Path(source)
    if _inspect(source, path)[0]:
        return describe_image_folder(path)
    dataset = read_dataset(source)
    return replace(dataset.summary(), inputs=measure_inputs(dataset))


def _inspect(source: str, path: Path) -> tuple[bool, bool]:
    """Whether a path is a folder, and whether it exists."""
    with explain_os_errors(f"data source {source!r:.200} cannot be read", "check the path"):
        return path.is_dir(), path.exists()


def _read(source: str, form: DataForm | None) -> Dataset:
    path = Path(source)
    is_folder, exists = _inspect(source, path)
    if is_folder and form is None:
        return read_image_folder(path)
    if is_folder and form is not None:
        return read_image_folder(path, form.input_shape, form.transform)
    if path.suffix == ".npz":
        return read_npz(path)
    match = _ENTRY_POINT.fullmatch(source)
    if match is not None:
        return _read_named(source, match.group(1), match.group(2))
    if not exists:
        raise FileError(f"data source {source!r} does not exist; name a folder, an .npz file, {_OTHERS}")
    raise DataError(f"data source {source!r} must be a folder of images by class, an .npz file, {_OTHERS}")


def _read_named(source: str, name: str, part: str) -> Dataset:
    # Imported here to save memory on devices with their own data.
    from subfleet.tasks.named_dataset import DATASETS

    if name not in DATASETS.names:
        suggestion = suggest(name, DATASETS.names) if part in _PARTS else ""
        return _read_entry_point(source, name, part, suggestion)
    try:
        named = DATASETS.load(name)
    except ConfigError as error:
        raise DataError(f"data source {source!r}: {error}") from error
    if part not in _PARTS:
        raise DataError(
            f"data source {source!r} must name a part of {named.name}: {named.name}:train or {named.name}:test"
        )
    parts = named.load()
    return parts.train if part == "train" else parts.test


def _read_entry_point(source: str, module_name: str, function_name: str, suggestion: str) -> Dataset:
    function = _import(source, module_name, function_name, suggestion)
    try:
        result = function()
    # The user's own code may raise anything, and they need to see its message.
    except (Exception, SystemExit) as error:
        raise DataError(
            f"data source {source!r} raised {type(error).__name__}: {error}; correct the function"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataError(f"data source {source!r} returned {type(result).__name__}, but must return (inputs, labels)")
    return make_dataset(result[0], result[1], source)


def _import(source: str, module_name: str, function_name: str, suggestion: str) -> Callable[[], Any]:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise DataError(
            f"data source {source!r} cannot be imported ({error}); install the module, or set PYTHONPATH to its folder"
            f"{suggestion}"
        ) from error
    # The user's own module may raise anything during the import.
    except (Exception, SystemExit) as error:
        raise DataError(
            f"data source {source!r} raised {type(error).__name__} during the import: {error}; correct the module"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise DataError(f"data source {source!r} must name a function, but {module_name} has no {function_name!r}")
    result: Callable[[], Any] = function
    return result
