"""Device profiles, resource logs and their replay, and populations of devices."""

from subfleet.device_profiles.logs import LogRow, ResourceLog, read_log, write_log
from subfleet.device_profiles.processors import detect_packing_width
from subfleet.device_profiles.profiles import PROFILES, DeviceProfile, compute_memory_budget, load_profile
from subfleet.device_profiles.replay import ReplayedLog
from subfleet.device_profiles.shipped import LOGS, find_demo_log, load_log

__all__ = [
    "LOGS",
    "PROFILES",
    "DeviceProfile",
    "LogRow",
    "ReplayedLog",
    "ResourceLog",
    "compute_memory_budget",
    "detect_packing_width",
    "find_demo_log",
    "load_log",
    "load_profile",
    "read_log",
    "write_log",
]
