"""Free memory under `ulimit`, measured in processes that are started with it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys
from subfleet.device.monitor import LiveMeter, load_psutil
kind = getattr(resource, sys.argv[1])
meter, process = LiveMeter(), load_psutil().Process()
def look():
    used = process.memory_info()
    room = resource.getrlimit(kind)[0] - (used.vms if sys.argv[1] == "RLIMIT_AS" else used.data)
    return meter.read(None)[1].memory_free_bytes, room
before = look()
taken = bytearray(60_000_000)
print(json.dumps([before, look()]))
"""
NEAR_BYTES = 4_000_000
"""Memory that the interpreter may allocate or free between two measurements."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "kind"), [("-v", "RLIMIT_AS"), ("-d", "RLIMIT_DATA"), ("-v 8000000 && ulimit -d", "RLIMIT_DATA")]
)
def test_a_limit_of_the_process_counts_without_its_used_memory(option: str, kind: str) -> None:
    """Of two limits, the tighter one counts."""
    script = f'ulimit {option} 400000 && exec "$0" -c "$1" {kind}'
    command = ["bash", "-c", script, sys.executable, PROGRAM]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
    (free_before, room_before), (free_after, room_after) = json.loads(process.stdout)
    assert 0 < free_before < 400_000 * 1024
    assert abs(free_before - room_before) < NEAR_BYTES
    assert abs(free_after - room_after) < NEAR_BYTES
    assert abs(free_before - free_after - 60_000_000) < NEAR_BYTES


@pytest.mark.slow
def test_doctor_reports_a_budget_within_the_limit() -> None:
    command = [sys.executable, "-m", "subfleet.edge_client.cli", "doctor", "--json", "--memory-fraction", "1"]
    process = subprocess.run(
        ["bash", "-c", 'ulimit -v 400000 && exec "$@"', "bash", *command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert 0 < json.loads(process.stdout)["budget_bytes"] < 400_000 * 1024
