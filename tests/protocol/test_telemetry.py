"""Telemetry: the free resources that a device reports."""

import dataclasses
import json

import pytest

from subfleet.protocol.messages import Telemetry, decode, encode
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import to_plain


def test_the_bytes_of_telemetry_are_fixed_with_a_disk_and_without() -> None:
    """Devices of earlier releases report no disk space, and servers of earlier releases read such telemetry."""
    telemetry = Telemetry(
        client_id="pi",
        session_id="s",
        run_id="r",
        round=1,
        log_time_s=None,
        reading=Reading(available=True),
        memory_budget_bytes=5,
        message_id="m",
    )
    reading = json.dumps(to_plain(Reading()), sort_keys=True, separators=(",", ":")).encode()
    before, after = (
        b'{"client_id":"pi",',
        b'"kind":"telemetry","log_time_s":null,"memory_budget_bytes":5,"message_id":"m","reading":%s,"round":1,'
        b'"run_id":"r","schema":3,"session_id":"s"}' % reading,
    )
    assert encode(telemetry) == before + after
    with_disk = dataclasses.replace(telemetry, disk_budget_bytes=7)
    assert encode(with_disk) == before + b'"disk_budget_bytes":7,' + after
    assert [decode(encode(message)) for message in (telemetry, with_disk)] == [telemetry, with_disk]
    with pytest.raises(ValueError, match="disk_budget_bytes is -1, but must be 0 or more"):
        dataclasses.replace(telemetry, disk_budget_bytes=-1)
