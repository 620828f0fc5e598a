"""The members of an emulated fleet: rows, of which those with something to do become agents."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from subfleet.agent.actions import MeasureForRound
from subfleet.agent.composing import compose_telemetry
from subfleet.agent.states import AgentSettings
from subfleet.device.meters import ReplayMeter
from subfleet.device_profiles import DeviceProfile, ReplayedLog
from subfleet.edge_client.measuring import measure
from subfleet.emulation.batch.disk import EmulatedDisk
from subfleet.emulation.gathering import EmulatedDevice, build_profile
from subfleet.protocol.messages import Profile, RoundInfo, Telemetry
from subfleet.protocol.plausible import plausible

_ENDLESS_S = 1e9
"""Clients of a batch send no heartbeats: they are there until they say otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A device of the fleet.

    Attributes:
        device: with its samples.
        profile: which it announces.
        log: which it replays; members may share it.
    """

    device: EmulatedDevice
    profile: Profile
    log: ReplayedLog

    @property
    def settings(self) -> AgentSettings:
        """The settings of its agent."""
        parts = (self.device.data, self.device.test)
        return AgentSettings(
            profile=self.profile,
            data_bytes=max(part.data_bytes for part in parts if part is not None),
            streams=self.device.data.transform is not None,
            heartbeat_s=_ENDLESS_S,
            telemetry_s=_ENDLESS_S,
        )


def list_members(devices: Sequence[EmulatedDevice]) -> dict[str, Member]:
    """The members of a fleet, by client id."""
    logs = {id(device.log): ReplayedLog(device.log) for device in devices}
    members = {}
    for device in devices:
        log = logs[id(device.log)]
        started = log if not device.log_start else log.started_at(device.log_start)
        members[device.client_id] = Member(device=device, profile=build_profile(device), log=started)
    return members


def list_intermittent(members: Mapping[str, Member]) -> frozenset[str]:
    """The members that are not available all the time."""
    logs = {id(member.device.log): member.device.log for member in members.values()}
    steady = {key for key, log in logs.items() if all(row.reading.available for row in log.rows)}
    return frozenset(name for name, member in members.items() if id(member.device.log) not in steady)


class FleetSurvey:
    """See `Survey`: the answers of members without a task to an announcement.

    Args:
        info: the announcement, with a log time.
        members: of the fleet.
        names: the members that answer.
        intermittent: the members that are not available all the time.
        now_s: logical time.
    """

    def __init__(
        self,
        info: RoundInfo,
        members: Mapping[str, Member],
        names: frozenset[str],
        *,
        intermittent: frozenset[str],
        now_s: float,
    ) -> None:
        self.run_id, self.round, self.attempt = info.run_id, info.round, info.attempt
        self.names = names
        self.away = frozenset(self._list_away(members, names & intermittent, info.log_time_s or 0.0))
        self._info, self._members, self._now_s = info, members, now_s
        self._disks_bytes: dict[int, int | None] = {}  # by the identity of a profile

    def read(self, client_id: str) -> Telemetry:
        """See `Survey.read`."""
        member, action = self._members[client_id], MeasureForRound(info=self._info, pinned=frozenset())
        meter, settings = ReplayMeter(member.log, lambda: self._now_s), member.settings
        measured = measure(action, settings, self._info, meter, self._measure_disk(member.device.profile))
        return plausible(compose_telemetry(settings, measured, self._now_s))

    def _measure_disk(self, profile: DeviceProfile) -> int | None:
        """The budget of an empty disk; members share profiles, and a limit is a text that takes long to read."""
        if id(profile) not in self._disks_bytes:
            self._disks_bytes[id(profile)] = EmulatedDisk(profile.disk_limit_bytes).measure_budget(frozenset())
        return self._disks_bytes[id(profile)]

    @staticmethod
    def _list_away(members: Mapping[str, Member], names: Iterable[str], log_time_s: float) -> Iterable[str]:
        return (name for name in names if not members[name].log.read(log_time_s).available)
