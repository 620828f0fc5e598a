"""Makes a module that a configuration names, and records it."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.recording.adapters import add_adapters
from subfleet.elastic.recording.cuts import EVERYTHING, Cuts
from subfleet.elastic.recording.freezing import freeze_parameters
from subfleet.elastic.recording.inputs import Inputs, count_numbers, count_symbols
from subfleet.elastic.recording.losses import LossFunction, record_loss
from subfleet.elastic.recording.record import pack_record
from subfleet.elastic.recording.recorder import record_module
from subfleet.elastic.recording.tuning import EVERYTHING_TRAINED, Tuning
from subfleet.protocol.errors import ConfigError


def make_module(name: str, arguments: Mapping[str, Any], *, tuning: Tuning = EVERYTHING_TRAINED) -> nn.Module:
    """Import a function, and make the module that it returns. Files in the current folder can be imported.

    Args:
        name: a function that returns a `torch.nn.Module`, or its class, such as "torchvision.models:resnet18".
        arguments: its named arguments.
        tuning: what training changes.

    Raises:
        ConfigError: there is no such function, it fails, it returns no module, or a pattern fits nothing in it.
    """
    module = _make(name, arguments)
    if tuning.lora is not None:
        add_adapters(module, tuning.lora)
    freeze_parameters(module, tuning.freeze)
    return module


def record_network(
    module: nn.Module,
    input_shape: tuple[int, ...],
    *,
    symbols: int = 0,
    inputs: Inputs = MappingProxyType({}),
    cuts: Cuts = EVERYTHING,
    loss: LossFunction | None = None,
) -> Recorded:
    """Record a module as the settings of a network; see `record_module`, and `record_loss` for the loss.

    Raises:
        ConfigError: the module or the loss cannot be recorded.
    """
    if inputs:
        input_shape, symbols = (count_numbers(inputs),), count_symbols(inputs)
    record = record_module(module, input_shape, symbols=symbols, inputs=inputs, cuts=cuts)
    if loss is not None:
        record = replace(record, loss=record_loss(loss, record, input_shape))
    return Recorded(input_shape=input_shape, class_count=record.class_count, recording=pack_record(record))


def make_loss(name: str) -> LossFunction:
    """Import a loss: a function, or the class of a module, which is made without arguments.

    Raises:
        ConfigError: there is no such function, or the class cannot be made.
    """
    found = _import(name, "loss")
    return _make(name, {}) if isinstance(found, type) else found


def _make(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    build = _import(name, "module")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # noqa: TID251 - the user's code draws; a repeated command must record the same network
        try:
            module = build(**arguments)
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(f"{name}(...) with the arguments {dict(arguments)} fails: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{name} returns {type(module).__name__}, but must return a torch.nn.Module")
    return module


def _import(name: str, key: str) -> Any:
    path, colon, attribute = name.partition(":")
    if not colon or not path or not attribute:
        raise ConfigError(f"{key} is {name!r:.80}, but must be like 'package.file:function'")
    try:
        with _importing_from(Path.cwd()):
            found: Any = importlib.import_module(path)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"module {path!r} cannot be imported ({type(error).__name__}: {error}); install its package, or run the "
            "command in the folder that contains it"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"module {path!r} has no {attribute!r}; name one of its functions or classes")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{name!r} is no function or class")
    return found


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Also import files of a folder."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
