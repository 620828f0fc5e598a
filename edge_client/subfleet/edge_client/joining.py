"""`subfleet-edge join`: starts a session that runs until it is stopped or its run is finished."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from subfleet.agent.states import AgentSettings
from subfleet.device.describing import describe_device
from subfleet.device.meters import Meter, ReplayMeter
from subfleet.device.monitor import LiveMeter
from subfleet.device.timing import ReplayedTiming
from subfleet.device_profiles import DeviceProfile, ReplayedLog, load_log
from subfleet.edge_client.device_options import DeviceOptions
from subfleet.edge_client.replaying import PacedWorker, follow_link
from subfleet.edge_client.session import Device, EdgeSession
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.task_work import TaskWorker
from subfleet.edge_client.worker_messages import Opened, Workplace
from subfleet.edge_client.worker_process import WorkerProcess
from subfleet.protocol.errors import DataError
from subfleet.protocol.input_statistics import find_scale_problem
from subfleet.protocol.jobs import DataSummary
from subfleet.protocol.messages import Profile
from subfleet.protocol.topics import Topics
from subfleet.transport.address import BrokerOptions, mqtt_client_id
from subfleet.transport.base import Transport
from subfleet.transport.chunk_sizes import KNOWN_BROKERS, ChunkSizes, KnownBroker
from subfleet.transport.locking import LockingTransport, make_device_lock
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.pacing import PacedTransport
from subfleet.transport.waiting import WaitingTransport

_LOG = logging.getLogger(__name__)
Durations = Literal["link", "modelled", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The command line of `join`; None means "not given".

    Attributes:
        broker: address and credentials.
        device: the device's id and properties.
        data: the training data.
        held_out: the data for evaluation; they are never used for training.
        replay: name or file of a resource log that replaces live readings.
        durations: what takes its time with a replayed log: "link" follows the log's link; "modelled" also lets work
            take as long as the profile's pace and the log's CPU load say, for emulated devices; "none" slows nothing.
        binds_memory: as in `Workplace`, as are groups.
        tells_statistics: whether to report the statistics of the inputs to the server, four numbers.
        leave_when_finished: whether to end when the run is finished.
        leave_with_stdin: whether to stop when standard input ends, which it does when the parent process ends.
        wait: whether to wait for a broker that is not reachable at the start.
    """

    broker: BrokerOptions
    device: DeviceOptions
    data: str
    held_out: str | None = None
    replay: str | None = None
    durations: Durations = "link"
    binds_memory: bool = False
    groups: Sequence[Path] = ()
    tells_statistics: bool = True
    leave_when_finished: bool = False
    leave_with_stdin: bool = False
    wait: bool = False


def join(options: JoinOptions) -> None:
    """Take part in a fleet until the run is finished or a signal comes.

    The first Ctrl-C (SIGTERM, or SIGHUP from a closed terminal) stops cleanly: the next start resumes the current task.
    The second one ends the process at once.

    Raises:
        SubfleetError: a setting, a file, the data or the broker cannot be used.
    """
    address, device_options = options.broker.address(os.environ), options.device
    client_id = device_options.choose_client_id(address.username)
    topics = Topics(device_options.fleet)
    profile = device_options.load_profile()
    stop = _StopRequest()
    broker: Transport = MqttTransport(address, mqtt_client_id(device_options.fleet, "device", client_id))
    if options.wait:
        broker = WaitingTransport(broker, lambda: stop.made)
    broker = LockingTransport(broker, make_device_lock(topics, client_id))
    replayed = None if options.replay is None else ReplayMeter(ReplayedLog(load_log(options.replay)))
    with (
        AgentStore.open(device_options.find_state_folder(client_id), profile.disk_limit_bytes) as store,
        WorkerProcess(_make_workplace(options, profile, store)) as process,
    ):
        opened = process.opened
        _check_held_out(opened, options)
        meter: Meter = replayed or LiveMeter(
            held_bytes=lambda: process.held_bytes, trains_in=lambda: process.process_id
        )
        summary = _summarise(opened.data, options)
        announced = describe_device(client_id, profile, opened.target, summary, meter, held_out=opened.held_out)
        settings = _make_settings(
            announced, [part for part in (opened.data, opened.held_out) if part is not None], options
        )
        known = KnownBroker(store.folder / KNOWN_BROKERS, address.host_and_port)
        transport: Transport = broker
        worker: TaskWorker = process
        if replayed is not None and options.durations != "none":
            transport = PacedTransport(broker, follow_link(replayed))
        if replayed is not None and options.durations == "modelled":
            worker = PacedWorker(process, _make_timing(profile, opened, replayed), replayed)
        device = Device(store=store, worker=worker, meter=meter, sizes=ChunkSizes.from_broker(known))
        session = EdgeSession(settings, transport, topics, device)
        _LOG.info(
            "%s (%s) joins fleet %s with %s, %d samples, %d held out, state in %s",
            client_id, profile.name, device_options.fleet, opened.target, opened.data.sample_count,
            settings.profile.held_out_count, store.folder,
        )  # fmt: skip
        _stop_on_signal(stop)
        if options.leave_with_stdin:
            threading.Thread(target=_stop_at_end_of_input, name="subfleet-stdin", daemon=True).start()
        session.run(lambda: stop.made)
        _LOG.info("the run is finished" if session.left else "interrupted; run the same command again to continue")


def _make_workplace(options: JoinOptions, profile: DeviceProfile, store: AgentStore) -> Workplace:
    return Workplace(
        runtimes=profile.runtimes,
        provider=profile.provider,
        data=options.data,
        held_out=options.held_out,
        threads=profile.threads,
        blobs=store.blob_folder,
        work_folder=store.work_folder,
        log_level=logging.getLogger().getEffectiveLevel(),
        binds_memory=options.binds_memory,
        groups=tuple(options.groups),
    )


def _make_settings(announced: Profile, data: Sequence[DataSummary], options: JoinOptions) -> AgentSettings:
    """Make the agent's settings from its profile and data."""
    return AgentSettings(
        profile=announced,
        data_bytes=max(part.data_bytes for part in data),
        streams=all(part.streams for part in data),
        leave_when_finished=options.leave_when_finished,
    )


def _summarise(summary: DataSummary, options: JoinOptions) -> DataSummary:
    """Drop the statistics from the summary unless they may be reported."""
    return summary if options.tells_statistics else replace(summary, inputs=None)


def _check_held_out(opened: Opened, options: JoinOptions) -> None:
    """Check that held-out data are of the same kind as the training data.

    Raises:
        DataError: they are not.
    """
    held_out, trained = opened.held_out, opened.data
    if held_out is None:
        return
    problem = ""
    if bool(held_out.class_counts) != bool(trained.class_counts):
        problem = "classes on one side and numbers on the other as labels"
    elif held_out.inputs is not None and trained.inputs is not None:
        problem = find_scale_problem(held_out.inputs, trained.inputs)
    if problem:
        raise DataError(
            f"the held-out data {options.held_out!r} do not match the data {options.data!r}: {problem}; "
            "prepare both in the same way"
        )


def _make_timing(profile: DeviceProfile, opened: Opened, meter: ReplayMeter) -> ReplayedTiming:
    return ReplayedTiming(
        log=meter.log,
        macs_per_s=profile.macs_per_s,
        sample_count=opened.data.sample_count,
        held_out_count=0 if opened.held_out is None else opened.held_out.sample_count,
    )


class _StopRequest:
    """A flag that a signal handler sets. The handler must not lock or log: it runs between any two instructions."""

    def __init__(self) -> None:
        self.made = False

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.made:
            raise KeyboardInterrupt
        self.made = True


def _stop_on_signal(request: _StopRequest) -> None:
    # Only the main thread may set handlers; in other threads (of an embedding program) the caller stops the session.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, request.handle)
        signal.signal(signal.SIGTERM, request.handle)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, request.handle)


def _stop_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
