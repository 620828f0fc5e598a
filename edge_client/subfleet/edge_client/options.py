"""The command line of `subfleet-edge`: commands, options and their parsers."""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.memory_size import parse_bytes

Command = Callable[[argparse.Namespace], int]
"""Runs a command from its parsed options; returns the exit code."""
_LONGEST_S = 1e9
"""About 32 years; 32-bit clocks end at twice that."""
_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "join": "subfleet-edge join mqtt://192.168.1.10:1883 --data ./data --profile raspberry_pi_4",
        "capture": "subfleet-edge capture --out monday.csv --seconds 3600 --every 5",
        "doctor": "subfleet-edge doctor mqtt://192.168.1.10:1883 --data ./data",
        "predict": "subfleet-edge predict state/models/run-1/model.onnx --data ./data --json",
    }
)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(int(ExitCode.USAGE), f"{self.prog}: {message}; see {self.prog} --help for an example\n")


class _ShowVersion(argparse.Action):
    """Prints the version and exits; the version is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        sys.stdout.write(f"{parser.prog} {version('subfleet')}\n")
        parser.exit()


def make_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Make the parser of the whole command line; `commands` maps each name to its function."""
    parser = _Parser(
        prog="subfleet-edge",
        description="The device side of Subfleet.",
        epilog=f"example: {_EXAMPLES['join']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # users copy examples, so each must be on one line
        allow_abbrev=False,  # a new option must not change the meaning of an abbreviated one
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the release and end")
    known = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (help_text, add_options, log_level) in COMMANDS.items():
        command = known.add_parser(
            name,
            help=help_text,
            description=help_text,
            epilog=f"example: {_EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument(
            "--verbose", action="store_true", help="log what happens inside, and show where an error comes from"
        )
        command.set_defaults(run=commands[name], log_level=log_level)
        add_options(command)
    return parser


def _add_broker_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ca", metavar="FILE", type=Path, help="authorities to trust, PEM (the system's)")
    parser.add_argument("--cert", metavar="FILE", type=Path, help="this device's certificate, PEM")
    parser.add_argument("--key", metavar="FILE", type=Path, help="the certificate's key, PEM")
    parser.add_argument(
        "--password-file", metavar="FILE", type=Path, help="the password of the address's user ($SUBFLEET_PASSWORD)"
    )
    parser.add_argument(
        "--shared-user", action="store_true", help="several devices sign in as the address's user, so it is not the id"
    )


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--id",
        dest="client_id",
        metavar="NAME",
        help="the device's id (default: the address's user, or the host's name)",
    )
    parser.add_argument(
        "--profile", metavar="NAME|FILE", default="generic", help="device profile, by name or .toml file (%(default)s)"
    )
    parser.add_argument("--fleet", metavar="NAME", default="main", help="name of the fleet (%(default)s)")
    parser.add_argument("--state", metavar="DIR", type=Path, help="folder for the device's state between starts")
    parser.add_argument(
        "--memory-fraction",
        metavar="F",
        type=_parse_fraction,
        help="fraction of free memory for training, above 0, at most 1",
    )
    parser.add_argument(
        "--memory-limit", metavar="SIZE", type=_parse_size, help="most memory for training, such as 300M or 1.5Gi"
    )


def _add_emulation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replay", metavar="LOG", help="read resources and link from this log, not from the device")
    parser.add_argument(
        "--durations",
        choices=("link", "modelled", "none"),
        default="link",
        help="with --replay, what takes its time: the log's link, or also work by the profile's pace and the log's CPU "
        "load (modelled), or nothing (%(default)s)",
    )
    parser.add_argument(
        "--bind-memory",
        dest="binds_memory",
        action="store_true",
        help="let the system end or refuse what exceeds the memory for training, for emulated devices",
    )
    parser.add_argument(
        "--group",
        dest="groups",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="control group for the process that trains; with --bind-memory it is limited by it",
    )


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the broker, mqtt://[user@]host[:port], or mqtts:// for TLS")
    _add_broker_options(parser)
    parser.add_argument(
        "--data",
        metavar="D",
        required=True,
        help="folder of images by class, .npz, part of a known data set such as digits:train, or module:function",
    )
    parser.add_argument("--held-out", metavar="D", help="held-out data for evaluations, named like --data (none)")
    _add_device_options(parser)
    parser.add_argument(
        "--disk-limit",
        metavar="SIZE",
        type=_parse_size,
        help="most disk for programs, updates and models, such as 500M (the profile's)",
    )
    _add_emulation_options(parser)
    parser.add_argument("--runtime", metavar="NAME", help="the runtime, such as onnx or executorch (the profile's)")
    parser.add_argument("--threads", metavar="N", type=_parse_count, help="threads of the runtime (the profile's)")
    parser.add_argument(
        "--provider", metavar="NAME", help="the runtime's provider: cpu, or cuda with a build that supports it"
    )
    parser.add_argument(
        "--architecture",
        metavar="FILE|JSON",
        help="declare this device's submodel or the settings of its network, such as "
        '{"preset": "vgg16"}, for methods that use declarations (the profile\'s)',
    )
    parser.add_argument(
        "--no-statistics",
        dest="tells_statistics",
        action="store_false",
        help="do not report minimum, maximum, mean and deviation of the inputs to the server",
    )
    parser.add_argument("--wait", action="store_true", help="wait for a broker that is not reachable yet")
    parser.add_argument("--leave-when-finished", action="store_true", help="exit with 0 when the run is finished")
    parser.add_argument(
        "--leave-with-stdin", action="store_true", help="stop when standard input ends, for use as a child process"
    )


def _add_capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("resources.csv"), help="(%(default)s)")
    parser.add_argument(
        "--seconds", metavar="N", type=_parse_positive, help="how long (until Ctrl-C, which ends with 0)"
    )
    parser.add_argument(
        "--every", metavar="S", type=_parse_positive, default=5.0, help="seconds between rows (%(default)s)"
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", help="a broker to try")
    _add_broker_options(parser)
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
    parser.add_argument(
        "--threads", metavar="N", type=_parse_count, default=1, help="threads of the runtime (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for scripts")


def _parse_fraction(text: str) -> float:
    share = _parse_number(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"is {text}, but must be above 0 and at most 1")
    return share


def _parse_size(text: str) -> str:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parse_positive(text: str) -> float:
    number = _parse_number(text)
    if not 0 < number <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"is {text}, but must be above 0 and at most {_LONGEST_S:g}")
    return number


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, but must be a whole number of 1 or more")
    return int(text)


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, but must be a number") from None


COMMANDS: Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None], int]] = MappingProxyType(
    {
        "join": ("take part in a fleet: train what fits, until stopped", _add_join, logging.INFO),
        "capture": ("record this device's resources as a resource log", _add_capture, logging.WARNING),
        "doctor": ("show what is missing, how to fix it, and what fits", _add_doctor, logging.WARNING),
        "predict": ("run a fetched model over a data set", _add_predict, logging.WARNING),
    }
)
"""By name: its summary, its options, and its log level."""
