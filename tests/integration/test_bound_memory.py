"""A client process that is forced onto a program beyond its memory: it dies, is given less, and the run goes on."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from matrices import mostly_long

from subfleet.emulation import processes
from subfleet.emulation.client_groups import ClientGroups, open_groups
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.link.device_link import DeviceLink
from subfleet.protocol.messages import Task
from subfleet.settings.fleet import MemoryLimits
from subfleet.settings.reading import read_run
from subfleet.settings.run_folder import create_folder

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.export, pytest.mark.timeout(300)]

BUDGET_BYTES, CLAIMED_BYTES, LARGEST_BYTES = 11_000_000, 10_000_000, 24_000_000
"""What the small device has for training, what its task says it takes, and what it takes."""
FILE = f"""
name = "bound"
rounds = 2
min_clients = 2
rates = [0.125, 1.0]
host = {{ durations = "none" }}
deploy_targets = []

[method]
type = "heterofl"

[model]
family = "mlp"
input_shape = [1, 8, 8]
class_count = 10
widths = [384]
depths = [4]
group_size = 16

[training]
learning_rate = 0.05
optimiser = {{ momentum = 0.9 }}

[clock]

[data]
name = "digits"
samples = 200
test_samples = 100

[[fleet.devices]]
id = "ada"
profile = "laptop"
steady = {{ memory_free_bytes = 8_000_000_000 }}

[[fleet.devices]]
id = "pi"
profile = "raspberry_pi_zero_2_w"
steady = {{ memory_free_bytes = {4 * BUDGET_BYTES + 100_000} }}
"""


@contextmanager
def refuse_groups(_threads: object) -> Iterator[ClientGroups]:
    yield ClientGroups(memory_limit="RLIMIT_DATA")


@pytest.mark.parametrize("limit", mostly_long(["the best there is", "RLIMIT_DATA"], "the best there is"))
def test_a_device_that_is_given_too_much_dies_and_goes_on_with_less(
    limit: str, exports: ExportPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that errs twice: in what the device has, and in what its task takes."""

    def bound(limits: MemoryLimits, offered_bytes: int, *, device: str, client_id: str) -> int:
        del limits, device
        return 2 * LARGEST_BYTES if client_id == "pi" and offered_bytes > CLAIMED_BYTES else offered_bytes

    def send_task(link: DeviceLink, task: Task) -> None:
        if task.planned_peak_bytes > BUDGET_BYTES and task.client_id == "pi":
            given.append(task.planned_peak_bytes)
            task = replace(task, planned_peak_bytes=CLAIMED_BYTES)
        send(link, task)

    given, send = list[int](), DeviceLink.send_task
    monkeypatch.setattr(MemoryLimits, "bound", bound)
    monkeypatch.setattr(DeviceLink, "send_task", send_task)
    monkeypatch.setattr(processes, "open_groups", refuse_groups if limit == "RLIMIT_DATA" else open_groups)
    (tmp_path / "bound.toml").write_text(FILE, encoding="utf-8")
    run = read_run(str(tmp_path / "bound.toml"), ())
    folder = create_folder(tmp_path / "run")
    outcome = processes.run_processes(run, folder, Unobserved(), threading.Event(), exports=exports)

    rows = [{row.client_id: row for row in record.clients} for record in outcome.result.rounds]
    assert [{row.status for row in round_rows.values()} for round_rows in rows] == [{"aggregated"}] * 2
    used = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["memory_limit"]
    assert used in {"cgroup v2", "cgroup v1", "RLIMIT_DATA"}
    assert limit in {"the best there is", used}
    killed = used != "RLIMIT_DATA"
    why = "the worker process was ended by SIGKILL" if killed else "the system refused memory below the limit"
    assert rows[0]["pi"].refusals.startswith(f"memory: {why}")
    assert max(rows[0]["pi"].planned_peak_bytes, rows[1]["pi"].planned_peak_bytes) <= CLAIMED_BYTES // 2
    assert [size > LARGEST_BYTES for size in given] == [True] * (1 if killed else 2), "whose process died offers less"
    assert {round_rows["ada"].architecture for round_rows in rows} == {"w1"}
