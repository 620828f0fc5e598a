"""The child process of `subfleet.device.trials`: loads packages, or loads a runtime and trains with it.

It writes lines of JSON: the stage that it begins, and then a report of each package or runtime. Whatever
happens on the way, an error, an abort or a signal, happens to this process alone.
"""

import faulthandler
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from subfleet.protocol.errors import ConfigError, MissingExtraError, SubfleetError
from subfleet.protocol.loading import explain_load_error

Report = dict[str, str | bool]


def main(arguments: Sequence[str]) -> None:
    """Make a trial: a folder to write to, and "packages MODULE DISTRIBUTION ..." or "runtime NAME PROVIDER"."""
    # What libraries print must not stand between the reports.
    channel = os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable()  # says on standard error where a signal struck
    _leave_no_core()
    work, kind, *names = arguments

    def tell(report: Mapping[str, str | bool]) -> None:
        os.write(channel, json.dumps(report).encode() + b"\n")

    def begin(stage: str) -> None:
        tell({"stage": stage})

    for first, second in zip(names[::2], names[1::2], strict=True):
        begin("loaded")
        if kind == "packages":
            tell(_report(partial(_load_package, first, second)))
        else:
            tell(_report(partial(_run_runtime, first, second, Path(work), begin)))
    os.close(channel)
    sys.stderr.flush()
    os._exit(0)  # a runtime that dies while it is taken down has worked


def _report(work: Callable[[], str]) -> Report:
    try:
        return {"text": work()}
    except (MissingExtraError, ConfigError) as error:
        return {"problem": str(error), "installed": False, "code": str(int(error.exit_code))}
    except SubfleetError as error:
        return {"problem": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a package raises is what is to be found out
        return {"problem": str(explain_load_error("", error))}


def _load_package(module: str, distribution: str) -> str:
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


def _run_runtime(name: str, provider: str, work: Path, begin: Callable[[str], None]) -> str:
    from subfleet.device.runtime_trial import run_runtime  # packages are tried without the modules of a task

    return run_runtime(name, provider, work, begin)


def _leave_no_core() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
