"""What `subfleet run` does: one run after the other, each in a folder of its own, on one host or another."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from subfleet.protocol.errors import ConfigError
from subfleet.settings.fleet import HostKind
from subfleet.settings.kept import FILE, free_folder, kept_run
from subfleet.settings.parts import parts_of
from subfleet.settings.resuming import check_taken_up
from subfleet.settings.run import Run
from subfleet.settings.summary import SUMMARY
from subfleet.settings.taking import with_model

if TYPE_CHECKING:
    from subfleet.cli.console import Display
    from subfleet.export.cache import CacheFolder
    from subfleet.serving.outcome import Outcome
    from subfleet.transport.address import BrokerAddress

__all__ = ["RunOptions", "next_steps", "on_host", "run_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line says beside the runs.

    Attributes:
        runs: folder in which each run's own folder is made.
        name: of the folder; None takes the run's name with the first free number.
        broker: of client processes, where one is that is there already; None starts an embedded one.
        cache: where exported programs are kept between runs.
        stopping: a context in which signals set the event that it gives.
    """

    runs: Path
    name: str | None
    broker: "BrokerAddress | None"
    cache: "CacheFolder"
    stopping: "Callable[[], AbstractContextManager[threading.Event]]"


def run_all(runs: Sequence[Run], options: RunOptions, display: "Display") -> "list[Outcome]":
    """Run them one after the other. Those of a sweep that are over already are not run again.

    Raises:
        ConfigError: a run has no devices, its server's device is not there, a folder is that of another run, a name is
            given for several, or a model is to be taken from a run that is not over.
        SubfleetError: a run failed; the others before it have their results.
    """
    for run in runs:
        run.emulated_devices()
        _check_device(run)
    if len(runs) == 1:
        run = _taken(runs[0], options, display)
        return [_run(run, free_folder(options.runs, run.name, options.name), options, display)]
    if options.name is not None:
        raise ConfigError(f"--name is {options.name!r}, but there are {len(runs)} runs; leave it out, or set name")
    outcomes, started_s, played = list["Outcome"](), time.monotonic(), 0
    for number, one in enumerate(runs, start=1):
        run = _taken(one, options, display)
        folder = options.runs / run.name
        if _is_over(folder, run):
            display.say(f"{number} of {len(runs)}: {run.name} is over already")
            continue
        left = _time_left((time.monotonic() - started_s) / played if played else 0.0, len(runs) - number + 1)
        display.say(f"{number} of {len(runs)}: {run.name}{left}")
        outcomes.append(_run(run, folder, options, display))
        played += 1
    return outcomes


def _taken(run: Run, options: RunOptions, display: "Display") -> Run:
    if run.model_of is not None:
        display.say(f"{run.name} takes network {run.model_of.network!r} of run {run.model_of.run}")
    return with_model(run, options.runs)


def _check_device(run: Run) -> None:
    """Before there is a folder of a run that cannot begin; PyTorch is loaded for it only where it may be refused."""
    if run.device != "cpu":
        from subfleet.aggregation.devices import compute_device

        compute_device(run.device)


def _time_left(each_s: float, count: int) -> str:
    return f"; about {max(1, round(each_s * count / 60))} min are left" if each_s else ""


def _is_over(folder: Path, run: Run) -> bool:
    if not (folder / SUMMARY).exists() or not (folder / FILE).exists():
        return False
    remedy = "restore that, choose another --runs, or remove it"
    return not check_taken_up(f"the run in {folder}", parts_of(kept_run(folder)), parts_of(run), remedy)


def _run(run: Run, folder: Path, options: RunOptions, display: "Display") -> "Outcome":
    from subfleet.emulation.hosting import opened_host
    from subfleet.observers import started

    # While packages are loaded, Ctrl-C ends the command at once; then it lets the run end.
    with (
        started(folder, run, display) as (place, observer),
        opened_host(run.host.type, options.cache, options.broker) as host,
        options.stopping() as stop,
    ):
        try:
            return host(run, place, observer, stop)
        finally:
            display.ended()


def next_steps(outcome: "Outcome") -> Iterator[str]:
    """What the run reached and took, where to look, and the two lines that add a real device."""
    from subfleet.protocol.task_kinds import METRICS
    from subfleet.reporting.telling import ending_lines, reached_text

    yield ""
    yield reached_text(outcome.result)
    for model in outcome.models:
        difference, metric = model["max_abs_diff"], METRICS[model["metric"] or outcome.result.headline].title
        own = "unknown" if model["own"] is None else f"{model['own']:.4f}"
        known = "an unknown amount" if difference is None else f"{difference:.1e}"
        yield (
            f"  {model['client_id']}: {model['file']}, submodel {model['architecture']}, "
            f"{model['bytes'] / 1000:.0f} kB, differs from PyTorch by {known}, {metric} of its own {own}"
        )
    yield from ending_lines(outcome.result)
    yield f"Everything is in {outcome.folder}; look at {outcome.report}"
    yield ""
    yield "Add a real device. Start a server here, on a broker that the device can reach, then join from the device:"
    yield "  subfleet serve fleet --broker mqtt://BROKER:1883"
    yield "  pip install 'subfleet[edge]' && subfleet-edge join mqtt://BROKER:1883 --data digits:train"


def on_host(runs: Sequence[Run], host: HostKind | None) -> tuple[Run, ...]:
    """The runs on the host that the command line names, if it names one."""
    return tuple(run if host is None else replace(run, host=replace(run.host, type=host)) for run in runs)
