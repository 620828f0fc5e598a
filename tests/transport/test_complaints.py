import logging

import pytest

from subfleet.transport.complaints import Complaints


class _Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_a_sender_has_one_line_a_minute_with_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    complaints = Complaints(logging.getLogger("test"), clock)
    for number in range(23_446):
        complaints.note("eve", f"message {number}\x1b[2J")
    complaints.note("bob", "one of his own")
    assert _lines(caplog) == ["eve: message 0 [2J", "bob: one of his own"]
    clock.now_s += 59.0
    complaints.tick()
    assert _lines(caplog) == []
    clock.now_s += 1.0
    complaints.tick()
    complaints.note("eve", "again")
    assert _lines(caplog) == ["eve: 23445 more in the last 60 s, the last one: message 23445 [2J"]
    clock.now_s += 60.0
    complaints.tick()
    assert _lines(caplog) == ["eve: 1 more in the last 60 s, the last one: again"]
    clock.now_s += 60.0
    complaints.note("eve", "much later")
    assert _lines(caplog) == ["eve: much later"]


@pytest.mark.slow
def test_ever_new_senders_share_one_account(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    complaints = Complaints(logging.getLogger("test"), clock, most_senders=3)
    for number in range(1000):
        complaints.note(f"eve-{number}", "nonsense" * 1000)
    lines = _lines(caplog)
    assert [line.split(":")[0] for line in lines] == ["eve-0", "eve-1", "eve-2", "other senders"]
    assert max(map(len, lines)) < 500
    clock.now_s += 60.0
    complaints.tick()
    assert _lines(caplog)[0].startswith("other senders: 996 more in the last 60 s")
