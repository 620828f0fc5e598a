"""The fleet in the server's process: members become agents with their first task, and answer together."""

from typing import cast

import pytest
from agent.agent_cases import announce, train_task
from emulation.batch_cases import LARGE_BYTES, SMALL_BYTES, client

from subfleet.device_profiles import LogRow, ResourceLog
from subfleet.emulation.batch.agenda import LogicalClock
from subfleet.emulation.batch.agents import EmulatedAgent
from subfleet.emulation.batch.fleet import EmulatedFleet
from subfleet.emulation.batch.members import list_members
from subfleet.emulation.gathering import EmulatedDevice
from subfleet.protocol.messages import Message, RoundInfo, Task, Telemetry
from subfleet.protocol.readings import Reading
from subfleet.rounds.signals import Joined, Surveyed


class FakeAgent:
    """An agent that notes what it hears; it is idle until it has heard a task, and after `rest`."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.caught_up: list[tuple[RoundInfo | None, RoundInfo | None, float]] = []
        self.idle, self.joined = True, False
        self.settings = list_members([client("bob", 1, LARGE_BYTES)])["bob"].settings

    def receive(self, message: Message) -> None:
        self.heard.append(message)
        self.idle = self.idle and not isinstance(message, Task)

    def catch_up(self, measured: RoundInfo | None, heard: RoundInfo | None, log_starts_s: float) -> None:
        self.caught_up.append((measured, heard, log_starts_s))

    def join(self) -> None:
        self.joined = True


class Mute:
    """A client that nothing reaches."""

    def rewrite(self, message: Message) -> tuple[Message, ...]:
        return (message,)

    def accepts(self, kind: str) -> bool:
        return kind != "round"


class Fleet:
    """Three members, of which one is away in the second minute of its log."""

    def __init__(self, **interference: Mute) -> None:
        rows = [(0.0, True), (60.0, False)]
        reading = Reading(memory_free_bytes=LARGE_BYTES)
        log = ResourceLog(
            device="virtual",
            source="a test",
            licence="none",
            rows=tuple(
                LogRow(t_s=at_s, reading=reading if there else Reading(memory_free_bytes=5, available=False))
                for at_s, there in rows
            ),
        )
        intermittent = client("cyd", 2, LARGE_BYTES)
        devices: list[EmulatedDevice] = [
            client("ada", 0, SMALL_BYTES),
            client("bob", 1, LARGE_BYTES),
            EmulatedDevice(client_id="cyd", profile=intermittent.profile, data=intermittent.data, log=log),
        ]
        self.agents: dict[str, FakeAgent] = {}
        self.clock = LogicalClock()
        self.fleet = EmulatedFleet(list_members(devices), self.create, self.clock, interference)
        self.fleet.open()

    def create(self, client_id: str) -> EmulatedAgent:
        self.agents[client_id] = FakeAgent()
        return cast("EmulatedAgent", self.agents[client_id])

    def survey(self, info: RoundInfo) -> Surveyed:
        self.fleet.send(info)
        self.fleet.act()
        (surveyed,) = self.fleet.receive(0.0)
        assert isinstance(surveyed, Surveyed)
        return surveyed


def test_members_join_together_and_without_agents() -> None:
    fleet = Fleet()
    (joined,) = fleet.fleet.receive(0.0)
    assert isinstance(joined, Joined)
    assert [profile.client_id for profile in joined.profiles] == ["ada", "bob", "cyd"]
    assert fleet.agents == {}


@pytest.mark.parametrize(("at_s", "away"), [(0.0, set()), (60.0, {"cyd"}), (120.0, set())])
def test_a_survey_reads_logs_at_the_announced_time(at_s: float, away: set[str]) -> None:
    fleet = Fleet()
    list(fleet.fleet.receive(0.0))
    survey = fleet.survey(announce(1, log_time_s=at_s)).survey
    assert survey.names == {"ada", "bob", "cyd"}
    assert survey.away == away
    telemetry = survey.read("cyd")
    assert isinstance(telemetry, Telemetry)
    assert (telemetry.client_id, telemetry.round, telemetry.log_time_s) == ("cyd", 1, at_s)
    assert telemetry.reading.available is not bool(away)
    assert fleet.agents == {}


def test_a_member_is_an_agent_from_its_first_task_and_hears_announcements_until_it_rests() -> None:
    fleet = Fleet()
    list(fleet.fleet.receive(0.0))
    first = announce(1, log_time_s=60.0)
    assert fleet.survey(first).survey.names == {"ada", "bob", "cyd"}
    fleet.clock.advance(10.0)
    task = train_task("t1", 1, client_id="bob")
    fleet.fleet.send_task(task)
    fleet.fleet.act()
    assert fleet.agents.keys() == {"bob"}
    bob = fleet.agents["bob"]
    assert (bob.heard, bob.caught_up) == ([task], [(first, first, 60.0)])
    second = announce(2, log_time_s=120.0)
    assert fleet.survey(second).survey.names == {"ada", "cyd"}
    assert bob.heard == [task, second]
    bob.idle = True
    assert fleet.survey(announce(3)).survey.names == {"ada", "bob", "cyd"}
    assert bob.heard == [task, second]


def test_a_member_that_is_asked_is_an_agent_and_the_others_hear_nothing() -> None:
    fleet = Fleet()
    list(fleet.fleet.receive(0.0))
    opened = announce(1, "train", log_time_s=60.0, asynchronous=True)
    fleet.fleet.send(opened)
    fleet.fleet.act()
    assert fleet.agents == {}
    asked = announce(1, log_time_s=60.0, asynchronous=True)
    fleet.fleet.ask("bob", asked)
    fleet.fleet.act()
    assert fleet.agents.keys() == {"bob"}
    assert (fleet.agents["bob"].heard, fleet.agents["bob"].caught_up) == ([asked], [(None, opened, 60.0)])
    assert [*fleet.fleet.receive(0.0)] == [], "nobody else answers"


def test_a_member_with_interference_speaks_for_itself() -> None:
    fleet = Fleet(bob=Mute())
    (joined,) = fleet.fleet.receive(0.0)
    assert isinstance(joined, Joined)
    assert [profile.client_id for profile in joined.profiles] == ["ada", "cyd"]
    assert fleet.agents["bob"].joined
    assert fleet.survey(announce(1)).survey.names == {"ada", "cyd"}
    assert fleet.agents["bob"].heard == []


def test_logs_are_shared() -> None:
    one = client("ada", 0, SMALL_BYTES, LARGE_BYTES)
    other = EmulatedDevice(client_id="bob", profile=one.profile, data=one.data, log=one.log, log_start=1)
    same = EmulatedDevice(client_id="cyd", profile=one.profile, data=one.data, log=one.log)
    members = list_members([one, other, same])
    assert members["ada"].log is members["cyd"].log
    assert members["bob"].log.read(0.0) == members["ada"].log.read(60.0) != members["ada"].log.read(0.0)
