"""Log lines about wrong messages, at most one per sender and minute."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from subfleet.protocol.text import make_printable

_OTHERS = "other senders"
_MOST_CHARACTERS = 400  # length of one line


@dataclass(slots=True)
class _SenderRecord:
    logged_at_s: float
    left_out: int = 0
    last: str = ""


class Complaints:
    """Logs the first complaint about a sender at once, and counts further ones until the period is over.

    Args:
        log: the logger.
        clock: seconds, monotonic.
        period_s: seconds between two lines about one sender.
        most_senders: number of senders with a record of their own; all others share one.
    """

    def __init__(
        self,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        period_s: float = 60.0,
        most_senders: int = 256,
    ) -> None:
        self._log = log
        self._clock = clock
        self._period_s = period_s
        self._most_senders = most_senders
        self._accounts: dict[str, _SenderRecord] = {}  # ordered by their last line

    def note(self, sender: str, text: str) -> None:
        """Complain about a sender."""
        self.tick()
        text = make_printable(text)[:_MOST_CHARACTERS]
        if sender not in self._accounts and len(self._accounts) >= self._most_senders:
            sender = _OTHERS
        account = self._accounts.get(sender)
        if account is not None:
            account.left_out += 1
            account.last = text
            return
        self._accounts[sender] = _SenderRecord(self._clock())
        self._log.warning("%s: %s", sender, text)

    def tick(self) -> None:
        """Log the number of omitted lines of each period that is over."""
        now_s = self._clock()
        while self._accounts:
            sender, account = next(iter(self._accounts.items()))
            if now_s - account.logged_at_s < self._period_s:
                return
            del self._accounts[sender]
            if account.left_out:
                self._accounts[sender] = _SenderRecord(now_s)
                text = "%s: %d more in the last %.0f s, the last one: %s"
                self._log.warning(text, sender, account.left_out, now_s - account.logged_at_s, account.last)
