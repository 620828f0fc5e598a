"""A device logs each change in the server's messages once."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from agent.agent_cases import announce, profile, train_task
from edge_client.fleet_rig import Rig

from subfleet.agent.states import AgentSettings
from subfleet.edge_client.message_log import ReceivedLog
from subfleet.protocol.messages import Ack, Message, encode

REASON = "no submodel fits: the smallest needs 4000 bytes"


def log_messages(caplog: pytest.LogCaptureFixture, *messages: Message) -> list[str]:
    """The log records of these messages."""
    log = ReceivedLog(AgentSettings(profile=profile()))
    with caplog.at_level(logging.INFO):
        for message in messages:
            log.note(message)
    return [record.getMessage() for record in caplog.records]


def skip(number: int = 1, reason: str = REASON, attempt: str = "") -> Ack:
    of = f"telemetry.s1.run.{number}{attempt}"
    return Ack(of=of, status="accepted", reason=reason, message_id=f"skipped/{of}")


def test_an_announcement_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    second_attempt = replace(announce(1), attempt=2, message_id="run/1.2/measure")
    beacons = [announce(1, phase) for phase in ("measure", "train") for _ in range(27)]
    assert log_messages(caplog, *beacons, second_attempt, second_attempt, announce(2)) == [
        "run run round 1 of 3: measure",
        "run run round 1 of 3: train",
        "run run round 1 of 3: measure, attempted again (2)",
        "run run round 2 of 3: measure",
    ]


def test_the_reason_for_no_task_is_logged_once_until_it_changes_or_a_task_arrives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages = (
        *(announce(1), Ack(of="telemetry.s1.run.1", status="accepted"), skip(1), skip(1)),
        *(announce(2), skip(1, "late"), skip(2), skip(2, "its link is \x1b[2J slow")),
        *(announce(3), train_task("t", 3), skip(3, "its link is \x1b[2J slow"), skip(3, "x", attempt=".1")),
    )
    lines = [line for line in log_messages(caplog, *messages) if "no task" in line]
    assert lines == [
        f"round 1: this device has no task: {REASON}",
        "round 2: this device has no task: its link is  [2J slow",
        "round 3: this device has no task: its link is  [2J slow",
    ]


def test_a_session_logs_the_reason_for_no_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path)
    other = rig.broker.client("other")
    other.open(())
    rig.server.announce(announce(1))
    rig.until(lambda: "telemetry" in {message.KIND for message in rig.server.heard})
    other.publish("subfleet/1/main/down/pi/ack", encode(skip()))
    with caplog.at_level(logging.INFO):
        for _ in range(200):
            rig.turn()
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "no task" in line] == [f"round 1: this device has no task: {REASON}"]
    assert not [line for line in lines if "measure" in line]  # it was logged before
