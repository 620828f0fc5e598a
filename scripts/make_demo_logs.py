"""Writes the resource logs that the package ships: Ghent 4G/LTE bandwidth beside generated memory.

    SUBFLEET_DATA=<folder> python scripts/make_demo_logs.py

The folder must hold `bandwidth/ghent_4g_lte.csv.gz` (columns trace,t_s,dur_s,dl_mbps).
The same folder gives the same bytes.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from subfleet.device_profiles.generate import AppSwitchMemory
from subfleet.device_profiles.ghent import CITATION, join_rows, read_ghent
from subfleet.device_profiles.logs import ResourceLog, write_log
from subfleet.protocol.errors import ConfigError, SubfleetError

MB = 1_000_000
STEP_S = 5.0
ROW_COUNT = 110
UPLINK_FRACTION = 0.25
FOLDER = Path(__file__).parents[1] / "device_profiles" / "subfleet" / "device_profiles" / "data" / "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoLog:
    """One log to write: whose it is, which excerpt of which trace, which memory, and what supports its range."""

    device: str
    trace: str
    start_s: float
    memory: AppSwitchMemory
    support: str = ""


DEMO_LOGS = (
    DemoLog(
        device="raspberry_pi_zero_2_w",
        trace="report_foot_0002",
        start_s=0.0,
        memory=AppSwitchMemory(seed=11, low_bytes=60 * MB, high_bytes=110 * MB, dwell_s=90, noise_bytes=2 * MB),
        support=(
            "a Raspberry Pi Zero 2 W with 256 MB set aside for its GPU, as for video, had 120 MiB (126 MB) available "
            "(https://github.com/tiny-pilot/tinypilot/issues/1392); the range is that less 16 to 66 MB, which the "
            "agent and its runtime hold by assumption"
        ),
    ),
    DemoLog(
        device="raspberry_pi_4",
        trace="report_bus_0003",
        start_s=0.0,
        memory=AppSwitchMemory(seed=12, low_bytes=700 * MB, high_bytes=1_500 * MB, dwell_s=60, noise_bytes=10 * MB),
    ),
    DemoLog(
        device="android_phone",
        trace="report_tram_0002",
        start_s=0.0,
        memory=AppSwitchMemory(seed=13, low_bytes=300 * MB, high_bytes=900 * MB, dwell_s=30, noise_bytes=10 * MB),
    ),
    DemoLog(
        device="jetson_orin_nano",
        trace="report_bus_0001",
        start_s=0.0,
        memory=AppSwitchMemory(seed=14, low_bytes=3_000 * MB, high_bytes=5_000 * MB, dwell_s=150, noise_bytes=30 * MB),
    ),
    DemoLog(
        device="laptop",
        trace="report_car_0002",
        start_s=0.0,
        memory=AppSwitchMemory(seed=15, low_bytes=6_000 * MB, high_bytes=9_000 * MB, dwell_s=90, noise_bytes=50 * MB),
    ),
)


def make_log(demo: DemoLog, bandwidth_path: Path) -> ResourceLog:
    """Join a demo log's excerpt and its memory."""
    samples = read_ghent(bandwidth_path, demo.trace)
    memory = demo.memory.generate(count=ROW_COUNT, step_s=STEP_S)
    rows = join_rows(samples, memory, start_s=demo.start_s, step_s=STEP_S, uplink_fraction=UPLINK_FRACTION)
    return ResourceLog(
        device=demo.device,
        source=f"downlink: {demo.trace} from {demo.start_s:.0f} s on, {CITATION}; memory: generated",
        licence="downlink BSD-2-Clause (see LICENSE.ghent), the rest Apache-2.0",
        notes=(
            demo.memory.describe(),
            *([f"range of free memory: {demo.support}"] if demo.support else []),
            f"downlink is the trace's mean over each step of {STEP_S:.0f} s",
            f"uplink is {UPLINK_FRACTION} of the downlink, by assumption: the trace measured the downlink only",
        ),
        rows=rows,
    )


def main() -> int:
    """Write every log; one sentence and a number where that cannot be."""
    try:
        data = os.environ.get("SUBFLEET_DATA")
        if not data:
            raise ConfigError("SUBFLEET_DATA is not set, but must name the folder that holds bandwidth/; set it")
        FOLDER.mkdir(parents=True, exist_ok=True)
        for demo in DEMO_LOGS:
            path = FOLDER / f"{demo.device}.csv"
            write_log(path, make_log(demo, Path(data) / "bandwidth" / "ghent_4g_lte.csv.gz"))
            print(f"wrote {path.name}")
    except SubfleetError as error:
        print(f"make_demo_logs: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
