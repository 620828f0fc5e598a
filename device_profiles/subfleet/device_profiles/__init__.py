"""What devices are and what they had to give: profiles, resource logs, replay, and generated series."""

from subfleet.device_profiles.logs import LogRow, ResourceLog, read_log, write_log
from subfleet.device_profiles.processors import own_packing_width
from subfleet.device_profiles.profiles import PROFILES, DeviceProfile, load_profile, memory_budget_bytes
from subfleet.device_profiles.replay import ReplayedLog
from subfleet.device_profiles.shipped import LOGS, demo_log_path, load_log

__all__ = [
    "LOGS",
    "PROFILES",
    "DeviceProfile",
    "LogRow",
    "ReplayedLog",
    "ResourceLog",
    "demo_log_path",
    "load_log",
    "load_profile",
    "memory_budget_bytes",
    "own_packing_width",
    "read_log",
    "write_log",
]
