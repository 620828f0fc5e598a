"""The commands of `subfleet-edge`: join a fleet, record a log, check the device, run a model."""

import argparse
import dataclasses
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from subfleet.edge_client.failures import LOG_FORM, explain_error
from subfleet.edge_client.options import Command, make_parser
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.interruption import interruptible
from subfleet.protocol.logs import log_to_standard_error
from subfleet.protocol.task_kinds import format_metrics
from subfleet.protocol.text import escape

_LOG = logging.getLogger(__name__)
_SHOWN_CLASSES = 10
OptionsT = TypeVar("OptionsT")

_STOPPED = "interrupted; run the same command again to continue"


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Every error becomes one sentence on standard error."""
    with interruptible() as interrupted:
        try:
            options = make_parser(_COMMANDS).parse_args(arguments)
            level = logging.DEBUG if options.verbose else options.log_level
            log_to_standard_error(level, form=LOG_FORM)
            code: int = options.run(options)
        except KeyboardInterrupt:
            return _complain(ExitCode.INTERRUPTED, _STOPPED)
        except Exception as error:  # noqa: BLE001 - the rim: nothing may reach the user as a traceback
            _LOG.debug("the command failed", exc_info=True)
            return _complain(ExitCode.INTERRUPTED, _STOPPED) if interrupted() else _complain(*explain_error(error))
    return code


def _complain(code: ExitCode, sentence: str) -> int:
    sys.stderr.write(f"subfleet-edge: {escape(' '.join(sentence.split()))}\n")
    return int(code)


# --- the commands; each loads only what it needs ---


def _join(options: argparse.Namespace) -> int:
    from subfleet.edge_client.device_options import DeviceOptions
    from subfleet.edge_client.joining import JoinOptions, join
    from subfleet.transport.address import BrokerOptions

    join(_select(JoinOptions, options, broker=_select(BrokerOptions, options), device=_select(DeviceOptions, options)))
    return int(ExitCode.OK)


def _select(kind: Callable[..., OptionsT], options: argparse.Namespace, **extra: object) -> OptionsT:
    """Make a record from the options with the names of its fields."""
    names = inspect.signature(kind).parameters.keys() - extra.keys()
    return kind(**{name: value for name, value in vars(options).items() if name in names}, **extra)


def _capture(options: argparse.Namespace) -> int:
    from subfleet.device.capture import CaptureOptions, capture
    from subfleet.device.monitor import LiveMeter

    settings = CaptureOptions(path=options.out, duration_s=options.seconds, step_s=options.every)
    sys.stderr.write(f"recording to {options.out}; Ctrl-C ends it\n")
    try:
        capture(settings, LiveMeter())
    except KeyboardInterrupt:
        # Every row is written; this is the normal end of an unlimited recording.
        sys.stderr.write("stopped\n")
    return int(ExitCode.OK)


def _doctor(options: argparse.Namespace) -> int:
    from subfleet.edge_client.device_options import DeviceOptions
    from subfleet.edge_client.doctor import DoctorOptions, examine
    from subfleet.transport.address import BrokerOptions

    broker = None if options.url is None else _select(BrokerOptions, options)
    examination = examine(DoctorOptions(broker=broker, data=options.data, device=_select(DeviceOptions, options)))
    if options.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(examination), indent=2) + "\n")
    else:
        for finding in examination.findings:
            mark = "ok  " if finding.code is ExitCode.OK else "FAIL"
            sys.stdout.write(f"{mark} {finding.check}: {finding.text}\n")
            if finding.remedy:
                sys.stdout.write(f"     {finding.remedy}\n")
    bad = (finding.code for finding in examination.findings if finding.code is not ExitCode.OK)
    return int(next(bad, ExitCode.OK))


def _predict(options: argparse.Namespace) -> int:
    from subfleet.device.runtimes import check_runtime, find_trainer

    trainer = find_trainer(options.model)
    check_runtime(trainer.target)
    prediction = trainer.predict(options.model, options.data, options.threads)
    if options.json:
        plain = {
            "model": str(options.model),
            "accuracy": prediction.accuracy,
            "headline": prediction.headline,
            "metrics": dict(prediction.metrics),
            "numbers": prediction.numbers,
            "labels": prediction.labels,
            "names": prediction.names,
        }
        sys.stdout.write(json.dumps(plain) + "\n")
    else:
        count = len(prediction.labels) or len(prediction.numbers)
        by_accuracy = prediction.headline == "accuracy"
        metrics_text = format_metrics(
            {name: prediction.metrics[name] for name in ["accuracy"] if by_accuracy} or prediction.metrics
        )
        unit = "samples" if by_accuracy else "labels"
        sys.stdout.write(f"{options.model}: {metrics_text} on {count} {unit}\n")
        if prediction.numbers:
            numbers = ", ".join(f"{number:.4g}" for number in prediction.numbers[:_SHOWN_CLASSES])
            sys.stdout.write(f"predicted: {numbers}{', ...' * (count > _SHOWN_CLASSES)}\n")
            return int(ExitCode.OK)
        counts = Counter(prediction.names).most_common()
        classes = ", ".join(f"{name} ({times})" for name, times in counts[:_SHOWN_CLASSES])
        more = f" and {len(counts) - _SHOWN_CLASSES} more classes" if len(counts) > _SHOWN_CLASSES else ""
        sys.stdout.write(f"predicted: {classes}{more}\n")
    return int(ExitCode.OK)


_COMMANDS: Mapping[str, Command] = MappingProxyType(
    {"join": _join, "capture": _capture, "doctor": _doctor, "predict": _predict}
)
"""The function of each command, by the name in `options`."""
