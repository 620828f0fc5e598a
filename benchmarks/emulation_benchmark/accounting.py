"""A large fleet of unequal devices, accounted: seconds of a process of its own."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.emulation.accounting.host import account
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.protocol.readings import Reading
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import LogClock
from subfleet.tasks import Dataset

_TAKING_PART, _PARTS, _SAMPLES = 20, 200, 64
_FREE_BYTES = (3 * 10**7, 10**9)
"""The least and the most memory that is free, a fraction of which is for training."""


def gather_fleet(members: int, rounds: int) -> GatheredRun:
    """Devices with budgets and paces of their own, and a ResNet whose submodels are searched for each of them."""
    stream = np.random.default_rng(0)
    parts = [_draw(stream) for _ in range(_PARTS)]
    profile = DeviceProfile(name="virtual", title="A member", memory_fraction=0.5, runtimes=("onnx",), macs_per_s=1e9)
    devices = tuple(
        EmulatedDevice(client_id=f"m{number:05}", profile=profile, data=parts[number % _PARTS], log=_draw_log(stream))
        for number in range(members)
    )
    run = Run(
        name="accounting",
        model=PreactResNet(
            input_shape=(3, 32, 32), class_count=10, widths=(16, 32, 64), depths=(2, 2, 2), group_size=4
        ),
        data=DataSettings(test="unused"),
        rounds=rounds,
        min_clients=_TAKING_PART,
        clients_per_round=_TAKING_PART,
        method=DynamicSelection(),
        clock=LogClock(),
        targets=("onnx",),
        deploy_targets=(),
        seed=1,
    )
    return GatheredRun(run=run, devices=devices, evaluation=parts[0])


def _draw(stream: np.random.Generator) -> Dataset:
    images = stream.normal(size=(_SAMPLES, 3, 32, 32)).astype(np.float32)
    return Dataset(inputs=images, labels=np.arange(_SAMPLES, dtype=np.int64) % 10)


def _draw_log(stream: np.random.Generator) -> ResourceLog:
    rows = tuple(
        LogRow(
            t_s=60.0 * index,
            reading=Reading(
                memory_free_bytes=int(np.exp(stream.uniform(*np.log(_FREE_BYTES)))),
                downlink_bps=float(stream.uniform(1e6, 1e8)),
                uplink_bps=float(stream.uniform(1e6, 1e8)),
                available=bool(stream.random() < 0.9),
            ),
        )
        for index in range(4)
    )
    return ResourceLog(device="virtual", source="a benchmark", licence="none", rows=rows)


def main(arguments: Sequence[str]) -> None:
    """Account the fleet in the arguments, and print what it took."""
    settings = json.loads(arguments[0])
    gathered = gather_fleet(settings["members"], settings["rounds"])
    with ExportPool(CacheFolder(path=Path(settings["cache"])), workers=1) as exports:
        started_s, began_s = time.monotonic(), time.process_time()
        result = account(gathered, exports, observer=Unobserved())
        found = {
            "clients": settings["members"],
            "rounds": len(result.rounds),
            "seconds": round(time.monotonic() - started_s, 1),
            "cpu_s": round(time.process_time() - began_s, 1),
            "submodels": len({row.architecture_id for record in result.rounds for row in record.aggregated}),
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
