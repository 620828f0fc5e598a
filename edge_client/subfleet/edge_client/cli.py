"""The command `subfleet-edge`: join a fleet, record a log, find out what is missing, run a model."""

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from subfleet.protocol.errors import MissingExtraError, SubfleetError
from subfleet.protocol.exit_codes import ExitCode

__all__ = ["main"]

_LOG = logging.getLogger(__name__)
_LONGEST_S = 1e9
"""Three decades; clocks of 32 bits end at the double of it."""
_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "join": "subfleet-edge join mqtt://192.168.1.10:1883 --data ./data --profile raspberry_pi_4",
        "capture": "subfleet-edge capture --out monday.csv --seconds 3600 --every 5",
        "doctor": "subfleet-edge doctor mqtt://192.168.1.10:1883 --data ./data",
        "predict": "subfleet-edge predict state/models/run-1/model.onnx --data ./data --json",
    }
)


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with an option, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(int(ExitCode.USAGE), f"{self.prog}: {message}; see {self.prog} --help for an example\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Whatever goes wrong ends as one sentence on standard error."""
    options = _parser().parse_args(arguments)
    level = logging.DEBUG if options.verbose else options.log_level
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        return _complain(ExitCode.INTERRUPTED, "stopped; start the same command again to go on")
    except SubfleetError as error:
        _LOG.debug("the command failed", exc_info=True)
        return _complain(error.exit_code, str(error))
    except ModuleNotFoundError as error:
        missing = MissingExtraError((error.name or "").partition(".")[0], "edge")
        return _complain(missing.exit_code, str(missing))
    except Exception as error:  # noqa: BLE001 - the rim: nothing may reach the user as a traceback
        _LOG.debug("the command failed", exc_info=True)
        text = f"this is a defect of Subfleet ({type(error).__name__}: {error}); --verbose shows where"
        return _complain(ExitCode.INTERNAL, text)
    return code


def _complain(code: ExitCode, sentence: str) -> int:
    sys.stderr.write(f"subfleet-edge: {' '.join(sentence.split())}\n")
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="subfleet-edge",
        description="The device side of Subfleet.",
        epilog=f"example: {_EXAMPLES['join']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example is copied: it must stand on one line
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_join(_command(commands, "join", "take part in a fleet: train what fits, until stopped", _join, logging.INFO))
    _add_capture(_command(commands, "capture", "record what this device has to give, as a resource log", _capture))
    _add_doctor(_command(commands, "doctor", "say what is missing, how to mend it, and what fits", _doctor))
    _add_predict(_command(commands, "predict", "run a fetched model over a data set", _predict))
    return parser


def _command(
    commands: "argparse._SubParsersAction[_Parser]",
    name: str,
    help_text: str,
    run: Callable[[argparse.Namespace], int],
    log_level: int = logging.WARNING,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help_text,
        description=help_text,
        epilog=f"example: {_EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--verbose", action="store_true", help="log everything, and show where an error comes from")
    parser.set_defaults(run=run, log_level=log_level)
    return parser


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--id", metavar="NAME", help="the device's id (default: the address's user, or the host's name)"
    )
    parser.add_argument(
        "--profile", metavar="NAME|FILE", default="generic", help="device profile, by name or .toml file (%(default)s)"
    )
    parser.add_argument("--fleet", metavar="NAME", default="main", help="name of the fleet (%(default)s)")
    parser.add_argument("--state", metavar="DIR", type=Path, help="folder for what outlives the process")
    parser.add_argument(
        "--memory-share", metavar="F", type=_share, help="share of free memory for training, above 0, at most 1"
    )


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the broker, mqtt://[user:password@]host[:port]")
    parser.add_argument(
        "--data",
        metavar="D",
        required=True,
        help="folder of images by class, .npz, part of a known data set such as digits:train, or module:function",
    )
    _add_device_options(parser)
    parser.add_argument("--replay", metavar="LOG", help="read resources and link from this log, not from the device")
    parser.add_argument("--runtime", metavar="NAME", help="what trains, such as onnx or executorch (the profile's)")
    parser.add_argument("--threads", metavar="N", type=_count, help="threads of the runtime (the profile's)")
    parser.add_argument(
        "--provider", metavar="NAME", help="what computes: cpu, or cuda with a build of the runtime that has it"
    )
    parser.add_argument(
        "--architecture",
        metavar="FILE|JSON",
        help="declare the subnet that this device has, for methods that go by declarations (the profile's)",
    )
    parser.add_argument("--leave-when-finished", action="store_true", help="end with 0 when the run is over")
    parser.add_argument(
        "--leave-with-stdin", action="store_true", help="stop when standard input ends, as a child of another program"
    )


def _add_capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("resources.csv"), help="(%(default)s)")
    parser.add_argument("--seconds", metavar="N", type=_positive, help="how long (until Ctrl-C, which ends with 0)")
    parser.add_argument("--every", metavar="S", type=_positive, default=5.0, help="seconds between rows (%(default)s)")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", help="a broker to try")
    parser.add_argument("--data", metavar="D", help="data to try")
    _add_device_options(parser)
    parser.add_argument("--json", action="store_true", help="for scripts")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE", type=Path, help="a .onnx or .pte model")
    parser.add_argument(
        "--data",
        metavar="D",
        required=True,
        help="folder of images by class, .npz, part of a known data set such as digits:train, or module:function",
    )
    parser.add_argument("--threads", metavar="N", type=_count, default=1, help="threads of the runtime (%(default)s)")
    parser.add_argument("--json", action="store_true", help="for scripts")


def _share(text: str) -> float:
    share = _number(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"is {text}, but must be above 0 and at most 1")
    return share


def _positive(text: str) -> float:
    number = _number(text)
    if not 0 < number <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"is {text}, but must be above 0 and at most {_LONGEST_S:g}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, but must be a whole number of 1 or more")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, but must be a number") from None


# --- the commands; each loads only what it needs ---


def _join(options: argparse.Namespace) -> int:
    from subfleet.edge_client.joining import JoinOptions, join

    join(
        JoinOptions(
            url=options.url,
            data=options.data,
            client_id=options.id,
            profile=options.profile,
            state=options.state,
            replay=options.replay,
            fleet=options.fleet,
            memory_share=options.memory_share,
            runtime=options.runtime,
            threads=options.threads,
            provider=options.provider,
            architecture=options.architecture,
            leave_when_finished=options.leave_when_finished,
            leave_with_stdin=options.leave_with_stdin,
        )
    )
    return int(ExitCode.OK)


def _capture(options: argparse.Namespace) -> int:
    from subfleet.edge_client.capture import CaptureOptions, capture
    from subfleet.edge_client.monitor import LiveMeter

    settings = CaptureOptions(path=options.out, duration_s=options.seconds, step_s=options.every)
    sys.stderr.write(f"recording to {options.out}; Ctrl-C ends it\n")
    try:
        capture(settings, LiveMeter())
    except KeyboardInterrupt:
        # Every row is on the disk: for a recording without an end this is the normal one.
        sys.stderr.write("stopped\n")
    return int(ExitCode.OK)


def _doctor(options: argparse.Namespace) -> int:
    from subfleet.edge_client.doctor import DoctorOptions, examine

    examination = examine(
        DoctorOptions(
            url=options.url,
            data=options.data,
            profile=options.profile,
            fleet=options.fleet,
            client_id=options.id,
            state=options.state,
            memory_share=options.memory_share,
        )
    )
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
    from subfleet.edge_client.runtimes import trainer_of_file

    prediction = trainer_of_file(options.model).predict(options.model, options.data, options.threads)
    if options.json:
        plain = {"model": str(options.model), "accuracy": prediction.accuracy, "labels": list(prediction.labels)}
        sys.stdout.write(json.dumps(plain) + "\n")
    else:
        count = len(prediction.labels)
        sys.stdout.write(f"{options.model}: accuracy {prediction.accuracy:.4f} on {count} samples\n")
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
