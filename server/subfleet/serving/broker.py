"""A broker of somebody else is tried before a run begins on it, so that what it does not do is known, and said."""

import os
import threading

from subfleet.journal.records import RunObserver
from subfleet.protocol.topics import Topics
from subfleet.settings.run import Run
from subfleet.transport.address import BrokerAddress, mqtt_client_id
from subfleet.transport.base import Transport
from subfleet.transport.broker_check import examine_broker
from subfleet.transport.chunk_sizes import ChunkSizes
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.waiting import WaitingTransport

__all__ = ["try_broker"]


def try_broker(
    address: BrokerAddress,
    run: Run,
    transport: MqttTransport,
    sizes: ChunkSizes,
    observer: RunObserver,
    wait_until: threading.Event | None = None,
) -> None:
    """Try the broker; the server's transport and its chunks go by what is found.

    Args:
        address: of the broker.
        run: that is to be served there.
        transport: of the server, not opened yet.
        sizes: of the server's chunks.
        observer: told what the broker does not do, a line each.
        wait_until: a broker that is not there is waited for until this is set; None does not wait.

    Raises:
        TransportError: the broker is not there, refuses us, or cannot be trusted.
    """

    def opened(first: Transport) -> Transport:
        return first if wait_until is None else WaitingTransport(first, wait_until.is_set)

    fleet = run.fleet.name
    client_id = mqtt_client_id(fleet, "doctor", f"{run.name}-{os.getpid()}")
    report = examine_broker(address, Topics(fleet), name=run.name, client_id=client_id, opened=opened)
    if wait_until is not None and wait_until.is_set():
        return
    transport.expect(report.terms)
    if report.chunk_bytes is not None:
        sizes.found(report.chunk_bytes)
    for finding in report.shortcomings:
        observer.say(f"Broker at {address.where}, {finding.check}: {finding.text}; {finding.remedy}")
