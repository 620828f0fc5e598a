"""Takes the measurements that an agent asks for."""

from subfleet.agent.actions import Measure, MeasureForRound, MeasureForTask
from subfleet.agent.events import Measured
from subfleet.agent.states import AgentSettings
from subfleet.device.meters import Meter
from subfleet.device_profiles.profiles import compute_memory_budget
from subfleet.protocol.messages import RoundInfo
from subfleet.protocol.readings import LogLow, Reading


def measure(
    action: Measure, settings: AgentSettings, info: RoundInfo | None, meter: Meter, disk_budget_bytes: int | None
) -> Measured:
    """Read the resources of a device.

    Args:
        action: what for.
        settings: of the agent.
        info: the announcement that the agent knows; its transform may change the size of samples.
        meter: of the device.
        disk_budget_bytes: disk space for a task, next to pinned blobs; None is unknown.
    """
    profile, data_bytes = settings.profile, settings.data_bytes_in(info)

    def budget_bytes(reading: Reading) -> int:
        limit_bytes = profile.max_training_bytes
        return compute_memory_budget(reading, profile.memory_fraction, limit_bytes=limit_bytes, data_bytes=data_bytes)

    at_s = quantile = None
    if isinstance(action, MeasureForRound):
        at_s, quantile = action.info.log_time_s, action.info.log_quantile
    elif isinstance(action, MeasureForTask):
        at_s = action.log_time_s
    log_time_s, reading = meter.read(at_s)
    low = None if quantile is None else meter.low(quantile)
    return Measured(
        measure=action,
        log_time_s=log_time_s,
        reading=reading,
        memory_budget_bytes=budget_bytes(reading),
        disk_budget_bytes=disk_budget_bytes,
        log_low=None
        if low is None
        else LogLow(memory_budget_bytes=budget_bytes(low), downlink_bps=low.downlink_bps, uplink_bps=low.uplink_bps),
    )
