"""`subfleet-edge doctor`: what this device has, what it lacks, how to mend it, and what fits."""

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from subfleet.device.describing import default_client_id, packing_width_of, profile_with
from subfleet.device.monitor import LiveMeter
from subfleet.device.runtimes import choose_trainer, load_trainer
from subfleet.device_profiles import DeviceProfile, memory_budget_bytes
from subfleet.edge_client.store import default_state_folder, read_saved
from subfleet.protocol.errors import FileError, MissingExtraError, SubfleetError, install_command
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.memory import planned_for
from subfleet.protocol.programs import decode_program
from subfleet.protocol.topics import DEFAULT_FLEET, Topics
from subfleet.transport.address import BrokerOptions, mqtt_client_id, parse_url

__all__ = ["DoctorOptions", "Examination", "Finding", "examine"]

_OLDEST_PYTHON = (3, 10)
_NEEDED: Mapping[str, str] = MappingProxyType(
    {"paho-mqtt": "paho.mqtt", "psutil": "psutil", "numpy": "numpy", "Pillow": "PIL"}
)
"""Packages by the name that they are installed by, and the one that they are imported by."""
_OPEN_TIMEOUT_S = 5.0
_SHOWN_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: its name.
        code: OK, or what a command would end with because of it.
        text: what was found.
        remedy: what to do; empty where nothing is to be done.
    """

    check: str
    code: ExitCode = ExitCode.OK
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Everything that was found, and the growth that training may cause now."""

    budget_bytes: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What the command line says; None leaves a check out."""

    broker: BrokerOptions | None = None
    data: str | None = None
    profile: str = "generic"
    fleet: str = DEFAULT_FLEET
    client_id: str | None = None
    shared_user: bool = False
    state: Path | None = None
    memory_share: float | None = None
    memory_limit: str | None = None


def examine(options: DoctorOptions) -> Examination:
    """Look at everything; a check that fails does not keep the others from being made.

    Raises:
        ConfigError: the profile or the share cannot be used.
    """
    profile = profile_with(options.profile, memory_share=options.memory_share, memory_limit=options.memory_limit)
    data = [] if options.data is None else [_data(profile, options.data)]
    memory, budget_bytes = _memory(profile, sum(taken_bytes for _, taken_bytes in data))
    findings = [_python(), *(_package(*names) for names in _NEEDED.items()), _runtimes(profile), memory]
    findings += [finding for finding, _ in data]
    broker = options.broker
    if broker is not None:
        findings += _broker(broker, options)
    findings.append(_attempt("fits", lambda: _fits(options, profile, budget_bytes)))
    return Examination(budget_bytes=budget_bytes, findings=tuple(findings))


def _memory(profile: DeviceProfile, taken_bytes: int) -> tuple[Finding, int]:
    try:
        _, reading = LiveMeter().read(None)
    except MissingExtraError as error:
        return Finding(check="memory", code=error.exit_code, text="cannot be measured", remedy=str(error)), 0
    share, limit_bytes = profile.memory_share, profile.memory_limit_bytes
    budget_bytes = memory_budget_bytes(reading, share, limit_bytes=limit_bytes, data_bytes=taken_bytes)
    limit = "none" if reading.memory_limit_bytes is None else _megabytes(reading.memory_limit_bytes)
    free = _megabytes(reading.memory_free_bytes or 0)
    most = "" if limit_bytes is None else f" and at most {_megabytes(limit_bytes)}"
    text = f"{free} free (control group limit: {limit}), share {share:g}{most}, budget {_megabytes(budget_bytes)}"
    return Finding(check="memory", text=text), budget_bytes


def _attempt(check: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check=check, text=look())
    except SubfleetError as error:
        return _failed(check, error)


def _failed(check: str, error: SubfleetError) -> Finding:
    # The errors of this project say what to do in their own sentence.
    return Finding(check=check, code=error.exit_code, text="cannot be used", remedy=str(error))


def _python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] >= _OLDEST_PYTHON:
        return Finding(check="python", text=text)
    return Finding(check="python", code=ExitCode.CONFIG, text=text, remedy="install Python 3.10 or newer")


def _package(name: str, module: str) -> Finding:
    if not _can_be_found(module):
        remedy = install_command("edge")
        return Finding(check=name, code=ExitCode.MISSING_EXTRA, text="not installed", remedy=remedy)
    try:
        return Finding(check=name, text=version(name))
    except PackageNotFoundError:  # a system's own build may be registered by another name, or by none
        return Finding(check=name, text="installed")


def _can_be_found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds it
        return False


def _runtimes(profile: DeviceProfile) -> Finding:
    """Each runtime is really loaded: what it was installed by says neither that it works nor what it computes with."""
    found, failed = [], []
    for name in profile.runtimes:
        try:
            found.append(f"{name} ({load_trainer(name, profile.provider).describe_runtime()})")
        except SubfleetError as error:
            failed.append(error)
    if found:
        return Finding(check="runtimes", text=", ".join(found))
    text = f"none of {list(profile.runtimes)} can be used with the provider {profile.provider!r}"
    return Finding(check="runtimes", code=failed[0].exit_code, text=text, remedy=str(failed[0]))


def _data(profile: DeviceProfile, data: str) -> tuple[Finding, int]:
    """What was found, and the bytes that the samples take while the device trains."""
    try:
        trainer, summary = choose_trainer(profile.runtimes, data, profile.provider)
    except SubfleetError as error:
        return _failed("data", error), 0
    shape = "x".join(map(str, summary.input_shape))
    classes = f"{len(summary.class_counts)} classes"
    if summary.class_names:
        more = ", ..." if len(summary.class_names) > _SHOWN_CLASSES else ""
        classes += f" ({', '.join(summary.class_names[:_SHOWN_CLASSES])}{more})"
    text = f"{summary.sample_count} samples of {shape} in {classes}, for {trainer.target}"
    return Finding(check="data", text=text), summary.data_bytes


def _broker(broker: BrokerOptions, options: DoctorOptions) -> list[Finding]:
    from subfleet.transport.broker_check import examine_broker

    name = _client_id(options)
    doctor = mqtt_client_id(options.fleet, "doctor", name)  # not the id of an agent that may be at work
    try:
        report = examine_broker(
            broker.address(os.environ),
            Topics(options.fleet),
            name=name,
            client_id=doctor,
            open_timeout_s=_OPEN_TIMEOUT_S,
        )
    except SubfleetError as error:
        return [_failed("broker", error)]
    return [
        Finding(
            check=finding.check,
            code=ExitCode.OK if finding.serves else ExitCode.TRANSPORT,
            text=finding.text,
            remedy=finding.remedy,
        )
        for finding in report.findings
    ]


def _client_id(options: DoctorOptions) -> str:
    user = None if options.broker is None else parse_url(options.broker.url).username
    return default_client_id(options.client_id, None if options.shared_user else user)


def _fits(options: DoctorOptions, profile: DeviceProfile, budget_bytes: int) -> str:
    folder = options.state or default_state_folder(options.fleet, _client_id(options))
    verdicts, width = [], packing_width_of(profile)
    # An agent may be at work in the folder: it is only read.
    for digest in read_saved(folder).programs:
        try:
            content = (folder / "blobs" / digest).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise FileError(f"the program {digest[:12]} cannot be read ({error.strerror}); check the disk") from error
        manifest = decode_program(content).manifest
        planned_bytes = planned_for(manifest.planned_peak_bytes, manifest.memory.packings, width)
        verdict = "fits" if planned_bytes <= budget_bytes else "does not fit"
        verdicts.append(f"{manifest.program_id[:12]} of {_megabytes(planned_bytes)} {verdict}")
    cached = f"cached: {', '.join(verdicts)}" if verdicts else "none is cached yet, they come with the first round"
    return f"programs of up to {_megabytes(budget_bytes)} planned; {cached}"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
