"""Runs emulated fleets one after the other, each in a folder of its own."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from subfleet.protocol.errors import ConfigError
from subfleet.settings.fingerprint import check_resumable, select_outcome_settings
from subfleet.settings.fleet import HostKind
from subfleet.settings.run import Run
from subfleet.settings.run_folder import DESCRIPTION, SUMMARY, choose_folder, read_description
from subfleet.settings.stored_networks import resolve_model

if TYPE_CHECKING:
    from subfleet.export.cache import CacheFolder
    from subfleet.journal.records import RunObserver
    from subfleet.serving.outcome import Outcome
    from subfleet.transport.address import BrokerAddress


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second Ctrl-C interrupts at once."""
    stop = threading.Event()

    def handle(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def set_host(
    runs: Sequence[Run], host: HostKind | None, *, workers: int | None = None, ray: str | None = None
) -> tuple[Run, ...]:
    """The runs on the given host, with so many worker processes or a Ray cluster; None leaves each as it is.

    Raises:
        ConfigError: workers are given for a host that has none, or both are given.
    """
    hosts = [
        replace(
            run.host,
            type=host or run.host.type,
            workers=run.host.workers if workers is None else workers,
            ray=run.host.ray if ray is None else ray,
        )
        for run in runs
    ]
    for option, value in {"--workers": workers, "--ray": ray}.items():
        if value and any(own.type != "batch" for own in hosts):
            raise ConfigError(f"{option} is {value}, but only a batch has workers; add --host batch")
    return tuple(replace(run, host=own) for run, own in zip(runs, hosts, strict=True))


def run_and_show(
    runs: Sequence[Run],
    folder: Path,
    *,
    json: bool,
    name: str | None = None,
    broker: "BrokerAddress | None" = None,
) -> None:
    """Run all, and print the results as text or JSON; see `run_all`."""
    from subfleet.cli.console import open_display
    from subfleet.export.cache import open_default_cache

    with open_display(json=json) as display:
        for outcome in run_all(runs, folder, display, cache=open_default_cache(), name=name, broker=broker):
            if json:
                typer.echo((outcome.folder / SUMMARY).read_text(encoding="utf-8"))
            for line in describe_outcome(outcome):
                display.say(line)


def run_all(
    runs: Sequence[Run],
    folder: Path,
    display: "RunObserver",
    *,
    cache: "CacheFolder",
    name: str | None = None,
    broker: "BrokerAddress | None" = None,
) -> "list[Outcome]":
    """Run all, one after the other. Runs of a sweep that are already finished are skipped.

    Args:
        runs: one run, or those of a sweep.
        folder: contains a folder for each run.
        display: shows the runs.
        cache: of exported programs.
        name: of the folder of a single run; None takes the run's name, with the first free number.
        broker: for client processes; None starts an embedded one.

    Raises:
        ConfigError: a run has no devices, the server's compute device is missing, a folder belongs to another run, a
            name is given for several runs, or the run whose model is needed is not finished.
        SubfleetError: a run failed; results of the runs before it are kept.
    """
    from subfleet.emulation.hosting import open_host
    from subfleet.observers import open_run_folder

    for run in runs:
        run.emulated_devices()
        if run.device != "cpu":  # PyTorch takes seconds to load
            from subfleet.aggregation.devices import compute_device

            compute_device(run.device)
    if name is not None and len(runs) > 1:
        raise ConfigError(f"--name is {name!r}, but there are {len(runs)} runs; leave it out, or set name")
    outcomes, started_s = list["Outcome"](), time.monotonic()
    for number, described in enumerate(runs, start=1):
        if (source := described.model_of) is not None:
            display.say(f"{described.name} takes network {source.network!r} of run {source.run}")
        run = resolve_model(described, folder)
        path = choose_folder(folder, run.name, name)
        if len(runs) > 1:
            path = folder / run.name
            title = f"{number} of {len(runs)}: {run.name}"
            if _is_over(path, run):
                display.say(f"{title} is already finished")
                continue
            each_s = (time.monotonic() - started_s) / len(outcomes) if outcomes else 0.0
            minutes = max(1, round(each_s * (len(runs) - number + 1) / 60))
            display.say(f"{title}; about {minutes} min left" if each_s else title)
        # Ctrl-C interrupts at once while packages are loaded; afterwards it stops the run in an orderly way.
        with (
            open_run_folder(path, run, display) as (created, observer),
            open_host(run.host.type, cache, broker) as host,
            stop_on_signals() as stop,
        ):
            outcomes.append(host(run, created, observer, stop))
    return outcomes


def _is_over(folder: Path, run: Run) -> bool:
    if not (folder / SUMMARY).exists() or not (folder / DESCRIPTION).exists():
        return False
    remedy = "restore the settings, choose another --runs, or remove it"
    return not check_resumable(
        f"the run in {folder}", select_outcome_settings(read_description(folder)), select_outcome_settings(run), remedy
    )


def describe_outcome(outcome: "Outcome") -> Iterator[str]:
    """Lines on the results of a run, its costs, its folder, and how to add a real device."""
    from subfleet.protocol.task_kinds import METRICS
    from subfleet.reporting.texts import describe_ending, describe_result

    yield ""
    yield describe_result(outcome.result)
    for model in outcome.models:
        difference, metric = model["max_abs_diff"], METRICS[model["metric"] or outcome.result.headline].title
        own = "unknown" if model["own"] is None else f"{model['own']:.4f}"
        deviation = "an unknown amount" if difference is None else f"{difference:.1e}"
        yield (
            f"  {model['client_id']}: {model['file']}, submodel {model['architecture']}, "
            f"{model['bytes'] / 1000:.0f} kB, differs from PyTorch by {deviation}, {metric} on its own samples {own}"
        )
    yield from describe_ending(outcome.result)
    yield f"Everything is in {outcome.folder}; look at {outcome.report}"
    yield ""
    yield "Add a real device. Start a server here, on a broker that the device can reach, then join from the device:"
    yield "  subfleet serve fleet --broker mqtt://BROKER:1883"
    yield "  pip install 'subfleet[edge]' && subfleet-edge join mqtt://BROKER:1883 --data digits:train"
