"""Where the time of a step goes, by operator."""

from rich.console import Console

from step_benchmark.data import Samples
from step_benchmark.stepping import Start
from subfleet.protocol.programs import Program


def print_profile(program: Program, start: Start, samples: Samples, threads: int, console: Console) -> None:
    pass
