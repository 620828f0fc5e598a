"""Memory that the devices of a run may give to training at most, whatever they offer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from subfleet.protocol.bounds import checked
from subfleet.protocol.memory_size import Size, bytes_of

__all__ = ["MemoryLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class MemoryLimits:
    """Limits as sizes such as "300M"; the closest one counts: of the client, else of its device, else of every device.

    Attributes:
        every_device: of each device that no other limit names; None is none.
        devices: by the name of a device profile, such as "raspberry_pi_4".
        clients: by the id of a client.
    """

    every_device: Size | None = None
    devices: Mapping[str, Size] = field(default_factory=lambda: MappingProxyType({}))
    clients: Mapping[str, Size] = field(default_factory=lambda: MappingProxyType({}))

    def bounded(self, offered_bytes: int, *, device: str, client_id: str) -> int:
        """What of a device's offer a run may use.

        Args:
            offered_bytes: the device's own budget.
            device: the name of its profile.
            client_id: its id.
        """
        limit = self.clients.get(client_id) or self.devices.get(device) or self.every_device
        return offered_bytes if limit is None else min(offered_bytes, bytes_of(limit))
