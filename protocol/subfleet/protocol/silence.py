"""Prevents libraries from reporting to their vendors: a table of their switches, and how to load them."""

import importlib
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """An environment variable that turns off a library's reports to its vendor.

    Attributes:
        modules: import names of the library, and of libraries that report through it.
        variable: its name.
        value: its value that turns reports off.
        reports: what the library does by default.
    """

    modules: tuple[str, ...]
    variable: str
    value: str
    reports: str


SWITCHES = (
    Switch(
        modules=("onnxruntime",),
        variable="ORT_DISABLE_TELEMETRY",
        value="1",
        reports="from 1.29 on, keeps an id of the device and uploads which models and hardware it ran",
    ),
    Switch(
        modules=("flwr_datasets", "flwr"),
        variable="FLWR_TELEMETRY_ENABLED",
        value="0",
        reports="keeps an id of the user and uploads which data sets and machines it is used with",
    ),
    Switch(
        modules=("huggingface_hub", "datasets"),
        variable="HF_HUB_DISABLE_TELEMETRY",
        value="1",
        reports="uploads which libraries are used, and names them in each of its requests",
    ),
    Switch(
        modules=("mlflow",),
        variable="MLFLOW_DISABLE_TELEMETRY",
        value="true",
        reports="fetches what to report, and uploads which of its functions are called",
    ),
    Switch(
        modules=("wandb",),
        variable="WANDB_ERROR_REPORTING",
        value="false",
        reports="uploads crashes of its own",
    ),
)
"""All used libraries that report to their vendors."""


def silence(environment: MutableMapping[str, str]) -> None:
    """Turn off all reports in an environment, such as `os.environ`; the user's own values stay.

    Most libraries read their variable on import, so this is called first in every process.
    """
    for switch in SWITCHES:
        environment.setdefault(switch.variable, switch.value)


def import_silently(module: str) -> Any:
    """Import a module with reports turned off.

    Raises:
        ImportError: the module is missing or cannot be loaded.
    """
    silence(os.environ)
    return importlib.import_module(module)
