"""`subfleet-edge doctor`: checks what this device has, what it lacks (with remedies), and which programs fit."""

import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from subfleet.device.control_groups import ControlGroups
from subfleet.device.describing import find_packing_width
from subfleet.device.monitor import LiveMeter
from subfleet.device.runtimes import choose_trainer
from subfleet.device.trials import TrialResult, try_packages, try_runtime
from subfleet.device_profiles import DeviceProfile, compute_memory_budget
from subfleet.edge_client.device_options import DeviceOptions
from subfleet.edge_client.store import read_saved
from subfleet.protocol.errors import BrokenError, FileError, MissingExtraError, SubfleetError, make_install_command
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.memory_plan import compute_peak_bytes
from subfleet.protocol.programs import decode_program
from subfleet.protocol.topics import Topics
from subfleet.transport.address import BrokerOptions, mqtt_client_id, parse_url

_LOG = logging.getLogger(__name__)

_OLDEST_PYTHON = (3, 10)
_NEEDED: Mapping[str, str] = MappingProxyType(
    {"paho-mqtt": "paho.mqtt", "psutil": "psutil", "numpy": "numpy", "Pillow": "PIL"}
)
"""Packages by their name for installation, and by their name for import."""
_OLDEST: Mapping[str, str] = MappingProxyType({"numpy": "1.26"})
"""Oldest versions of packages that a board's system may bring."""
_READS_DATA = frozenset({"numpy", "Pillow"})
_ENABLE_LIMITS = (
    "use --memory-limit, or add cgroup_enable=memory to the kernel's command line (on a Raspberry Pi "
    "/boot/firmware/cmdline.txt) and start the board again"
)
_OPEN_TIMEOUT_S = 5.0
_SHOWN_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name.
        code: OK, or the exit code that a command would end with because of it.
        text: the result.
        remedy: what to do; empty if nothing needs to be done.
    """

    check: str
    code: ExitCode = ExitCode.OK
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All findings, and the current budget of training."""

    budget_bytes: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """The command line of `doctor`; a check is left out if its option is None."""

    device: DeviceOptions = field(default_factory=DeviceOptions)
    broker: BrokerOptions | None = None
    data: str | None = None


def examine(options: DoctorOptions) -> Examination:
    """Run all checks; a failing one does not prevent the others.

    Raises:
        ConfigError: the profile or the fraction of memory cannot be used.
    """
    profile = options.device.load_profile()
    tried = {name: try_runtime(name, profile.provider) for name in profile.runtimes}
    packages = try_packages(_NEEDED)
    findings = [
        _check_python(),
        *(check_package(*entry) for entry in packages.items()),
        *_check_runtimes(profile, tried),
    ]
    broken = {name for name, result in packages.items() if result.broken}
    # Read before memory is measured: the samples are in memory during training.
    data = [] if options.data is None else [_check_data(profile, options.data, tried, broken)]
    memory, budget_bytes = _check_memory(profile, sum(taken_bytes for _, taken_bytes in data), broken)
    findings += [memory, *(finding for finding, _ in data)]
    if options.broker is not None and packages["paho-mqtt"].works:
        findings += _check_broker(options.broker, options)
    elif options.broker is not None:
        findings.append(_skip_check("broker", "paho-mqtt"))
    findings.append(_run_check("fits", lambda: _check_fit(options, profile, budget_bytes)))
    return Examination(budget_bytes=budget_bytes, findings=tuple(findings))


def _check_memory(profile: DeviceProfile, taken_bytes: int, broken: Collection[str]) -> tuple[Finding, int]:
    if "psutil" in broken:
        return _skip_check("memory", "psutil"), 0
    try:
        _, reading = LiveMeter().read(None)
    except MissingExtraError as error:
        return Finding(check="memory", code=error.exit_code, text="cannot be measured", remedy=str(error)), 0
    share, limit_bytes = profile.memory_fraction, profile.max_training_bytes
    budget_bytes = compute_memory_budget(reading, share, limit_bytes=limit_bytes, data_bytes=taken_bytes)
    limit = "none" if reading.cgroup_limit_bytes is None else _format_megabytes(reading.cgroup_limit_bytes)
    free = _format_megabytes(reading.memory_free_bytes or 0)
    most = "" if limit_bytes is None else f" and at most {_format_megabytes(limit_bytes)}"
    text = (
        f"{free} free (control group limit: {limit}), share {share:g}{most}, budget {_format_megabytes(budget_bytes)}"
    )
    remedy = ""
    if ControlGroups().lacks_memory_limits():
        text += "; this kernel cannot limit a container's memory, so any limit of this container has no effect"
        remedy = _ENABLE_LIMITS
    return Finding(check="memory", text=text, remedy=remedy), budget_bytes


def _skip_check(check: str, package: str) -> Finding:
    """Report that a check is skipped, because it would end this process."""
    return Finding(check=check, code=BrokenError.exit_code, text=f"not tested, because {package} does not work")


def _run_check(check: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check=check, text=look())
    except Exception as error:  # noqa: BLE001 - see _failed
        return _report_error(check, error)


def _report_error(check: str, error: Exception) -> Finding:
    """Run a check; its error becomes a finding."""
    if isinstance(error, SubfleetError):  # these errors contain the remedy
        return Finding(check=check, code=error.exit_code, text="cannot be used", remedy=str(error))
    _LOG.debug("the check %s failed", check, exc_info=error)
    text = f"raised {type(error).__name__}: {error}"
    return Finding(check=check, code=ExitCode.INTERNAL, text=text, remedy="this is a defect; --verbose shows where")


def _check_python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] >= _OLDEST_PYTHON:
        return Finding(check="python", text=text)
    return Finding(check="python", code=ExitCode.CONFIG, text=text, remedy="install Python 3.10 or newer")


def check_package(name: str, tried: TrialResult) -> Finding:
    """Report whether a needed package works, and is new enough."""
    if not tried.installed:
        return _explain_unusable(name, tried, text="not installed")
    if tried.works and _is_older(tried.text, _OLDEST.get(name, "0")):
        text, remedy = f"{tried.text}, but {_OLDEST[name]} or newer is needed", make_install_command("edge", name)
        return Finding(check=name, code=ExitCode.MISSING_EXTRA, text=text, remedy=remedy)
    return Finding(check=name, text=tried.text) if tried.works else _explain_unusable(name, tried)


def _is_older(version: str, oldest: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)  # a system's build may have no version
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < tuple(map(int, oldest.split(".")))


def _check_runtimes(profile: DeviceProfile, tried: Mapping[str, TrialResult]) -> list[Finding]:
    """Report the working runtimes, and each installed one that does not work."""
    working = [f"{name} ({result.text})" for name, result in tried.items() if result.works]
    text = f"none of {list(tried)} can be used with the provider {profile.provider!r}"
    first = next((result for result in tried.values() if result.broken), next(iter(tried.values())))
    findings = [
        Finding(check="runtimes", text=", ".join(working))
        if working
        else Finding(check="runtimes", code=first.code, text=text, remedy=first.sentence)
    ]
    for name, result in tried.items():
        if result.broken:
            findings.append(_explain_unusable(f"runtime {name}", result))
        elif not result.works:
            findings.append(Finding(check=f"runtime {name}", text=f"not used: {result.text}"))
    return findings


def _explain_unusable(check: str, tried: TrialResult, text: str = "") -> Finding:
    return Finding(check=check, code=tried.code, text=text or tried.text, remedy=tried.remedy)


def _check_data(
    profile: DeviceProfile, data: str, tried: Mapping[str, TrialResult], broken: Collection[str]
) -> tuple[Finding, int]:
    """Report on the data, and return the memory of the samples during training."""
    for package in _READS_DATA & set(broken):
        return _skip_check("data", package), 0
    names = [name for name, result in tried.items() if not result.broken] or list(tried)
    try:
        trainer, summary = choose_trainer(names, data, profile.provider, attempt=lambda name, _: tried[name])
    except Exception as error:  # noqa: BLE001 - see _failed
        return _report_error("data", error), 0
    shape = "x".join(map(str, summary.input_shape))
    classes = f"in {len(summary.class_counts)} classes" if summary.class_counts else "with numbers as labels"
    if summary.class_names:
        more = ", ..." if len(summary.class_names) > _SHOWN_CLASSES else ""
        classes += f" ({', '.join(summary.class_names[:_SHOWN_CLASSES])}{more})"
    text = f"{summary.sample_count} samples of {shape} {classes}, for {trainer.target}"
    return Finding(check="data", text=text), summary.data_bytes


def _check_broker(broker: BrokerOptions, options: DoctorOptions) -> list[Finding]:
    from subfleet.transport.broker_check import examine_broker

    name = _find_client_id(options)
    doctor = mqtt_client_id(options.device.fleet, "doctor", name)  # not the id of an agent that may be running
    try:
        report = examine_broker(
            broker.address(os.environ),
            Topics(options.device.fleet),
            name=name,
            client_id=doctor,
            open_timeout_s=_OPEN_TIMEOUT_S,
        )
    except Exception as error:  # noqa: BLE001 - see _failed
        return [_report_error("broker", error)]
    return [
        Finding(
            check=finding.check,
            code=ExitCode.OK if finding.serves else ExitCode.TRANSPORT,
            text=finding.text,
            remedy=finding.remedy,
        )
        for finding in report.findings
    ]


def _find_client_id(options: DoctorOptions) -> str:
    user = None if options.broker is None else parse_url(options.broker.url).username
    return options.device.choose_client_id(user)


def _check_fit(options: DoctorOptions, profile: DeviceProfile, budget_bytes: int) -> str:
    folder = options.device.find_state_folder(_find_client_id(options))
    verdicts, width = [], find_packing_width(profile)
    # An agent may be using the folder, so it is only read.
    for digest in read_saved(folder).programs:
        try:
            content = (folder / "blobs" / digest).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise FileError(f"the program {digest[:12]} cannot be read ({error.strerror}); check the disk") from error
        manifest = decode_program(content).manifest
        planned_bytes = compute_peak_bytes(manifest.planned_peak_bytes, manifest.memory.packings, width)
        verdict = "fits" if planned_bytes <= budget_bytes else "does not fit"
        verdicts.append(f"{manifest.program_id[:12]} of {_format_megabytes(planned_bytes)} {verdict}")
    cached = f"cached: {', '.join(verdicts)}" if verdicts else "none is cached yet, they come with the first round"
    return f"programs of up to {_format_megabytes(budget_bytes)} planned; {cached}"


def _format_megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
