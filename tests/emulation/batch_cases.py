"""A tiny virtual fleet on scikit-learn's digits: three sizes of devices, two rounds."""

from collections.abc import Sequence
from typing import Any

from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.families.records.residual import Mlp
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.readings import Reading
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import LogClock
from subfleet.tasks import Dataset, load_digits

MODEL = Mlp(input_shape=(1, 8, 8), class_count=10, widths=(64,), depths=(1,), group_size=4)
SAMPLES = 40
SMALL_BYTES, LARGE_BYTES = 2_000_000, 10**8
"""Memory budgets: half of the model fits into the first, all of it into the second."""


def log(free_bytes: Sequence[int]) -> ResourceLog:
    """Free memory that changes every 60 seconds; the profile gives half of it."""
    rows = tuple(
        LogRow(t_s=60.0 * index, reading=Reading(memory_free_bytes=2 * free, downlink_bps=1e7, uplink_bps=1e6))
        for index, free in enumerate(free_bytes)
    )
    return ResourceLog(device="virtual", source="a test", licence="none", rows=rows)


def part(index: int) -> Dataset:
    """The samples of one of 44 disjoint parts."""
    dataset = load_digits()
    indices = slice(index * SAMPLES, (index + 1) * SAMPLES)
    return Dataset(inputs=dataset.inputs[indices], labels=dataset.labels[indices])


def client(name: str, index: int, *free_bytes: int, runtime: str = "onnx") -> EmulatedDevice:
    data = part(index)
    data_bytes = data.summary().data_bytes
    profile = DeviceProfile(name="virtual", title="A device of a test", memory_fraction=0.5, runtimes=(runtime,))
    return EmulatedDevice(
        client_id=name,
        profile=profile,
        data=data,
        # The memory of the samples is not available for training.
        log=log([free + data_bytes // 2 for free in free_bytes]),
        runtime=runtime,
        test=part(20 + index),
        tier="small" if min(free_bytes) == SMALL_BYTES else "large",
    )


NESTED = HeteroFL(weighting="samples", class_mask=False, depth=True)
"""Widths and depths, as in the demo."""


def config(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "name": "virtual",
        "model": MODEL,
        "data": DataSettings(test="unused"),
        "rounds": 2,
        "min_clients": 3,
        "training": TrainingSettings(epochs=2, batch_size=8, learning_rate=0.05),
        "rates": (0.5, 1.0),
        "method": NESTED,
        "communication_s": 1.0,
        "clock": LogClock(start_s=0.0, step_s=60.0),
        "deploy_targets": (),
        "targets": ("onnx", "torch"),
        "memory_overhead_bytes": {},
        "seed": 5,
    }
    return Run(**{**settings, **changes})


def experiment(*, runtime: str = "onnx", **changes: Any) -> GatheredRun:
    """A client that is always small, one with growing memory, and one that is large."""
    clients = (
        client("ada", 0, SMALL_BYTES, SMALL_BYTES, runtime=runtime),
        client("bob", 1, SMALL_BYTES, LARGE_BYTES, runtime=runtime),
        client("cyd", 2, LARGE_BYTES, LARGE_BYTES, runtime=runtime),
    )
    return GatheredRun(run=config(**changes), devices=clients, evaluation=part(10))
