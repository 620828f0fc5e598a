"""When everyone is told where the run stands: at every change, on every connect, and again every so often."""

from subfleet.protocol.messages import RoundInfo

__all__ = ["Announcer"]

REPEAT_S = 2.0
"""A transport may lose an announcement, and no receipt answers it: so it is repeated."""


class Announcer:
    """Decides whether an announcement is due; it sends nothing itself."""

    def __init__(self) -> None:
        self._last = ""
        self._next_s = 0.0

    def due(self, info: RoundInfo | None, now_s: float) -> bool:
        """Whether this is to be published now; if so it counts as published."""
        if info is None:
            return False
        if info.message_id == self._last and now_s < self._next_s:
            return False
        self._last, self._next_s = info.message_id, now_s + REPEAT_S
        return True

    def again(self) -> None:
        """Whatever was said may be lost: say it at once."""
        self._last = ""
