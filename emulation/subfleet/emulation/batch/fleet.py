"""The link of a server to devices in its own process: messages are handed over as they are."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, get_args

from subfleet.emulation.batch.agenda import Agenda, LogicalClock
from subfleet.emulation.batch.agents import EmulatedAgent
from subfleet.emulation.batch.members import FleetSurvey, Member, list_intermittent
from subfleet.emulation.batch.resuming import FleetRecord
from subfleet.link.traffic import Traffic
from subfleet.protocol.answers import Update
from subfleet.protocol.messages import Ack, Message, RoundInfo, Task
from subfleet.protocol.plausible import plausible
from subfleet.rounds.signals import Arrival, FromDevice, Joined, Surveyed


class Interference(Protocol):
    """Changes what passes between a client and the server."""

    def rewrite(self, message: Message) -> Iterable[Message]:
        """The messages that the server gets instead of a message of the client."""
        ...

    def accepts(self, kind: str) -> bool:
        """Whether messages of a kind reach the client."""
        ...


class EmulatedFleet:
    """See `Link`. Messages wait in order until the other side acts; none is lost, and only blobs take time.

    A member becomes an agent when it is first asked, or with its first task. Without a task it hears no announcement: a
    survey has the answers of all that have none. Members with interference are agents from the start, and speak for
    themselves.

    Args:
        members: by client id.
        create: creates the agent of a member.
        clock: logical seconds.
        interference: by client id, for clients whose messages are changed.

    Attributes:
        clock: see above.
        agenda: what happens later.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        create: Callable[[str], EmulatedAgent],
        clock: LogicalClock,
        interference: Mapping[str, Interference],
    ) -> None:
        self.traffic = Traffic()
        self.agenda = Agenda()
        self.clock = clock
        self._members = members
        self._create = create
        self._interference = interference
        self._intermittent = list_intermittent(members)
        self._agents: dict[str, EmulatedAgent] = {}
        self._awake: set[str] = set()  # agents that hear announcements
        self._measured: RoundInfo | None = None
        self._heard: RoundInfo | None = None
        self._log_starts_s = 0.0
        self._said: list[Arrival] = []
        self._pulled: list[Update] = []
        self._sent: deque[tuple[str, Message]] = deque()  # with its receiver; empty for an announcement
        self._announced = ""
        self._pulls: dict[str, tuple[int, Update]] = {}  # by task, with the number in the agenda

    def act(self) -> bool:
        """Let every device react to what was sent and to the time; returns whether the server has something to do."""
        while self._sent:
            receiver, message = self._sent.popleft()
            if isinstance(message, RoundInfo) and not receiver:
                self._announce(message)
            elif isinstance(message, Task | RoundInfo) or receiver in self._awake:
                self._hand(self._wake(receiver), message)
        self.agenda.run(self.clock())
        return bool(self._said or self._pulled)

    @property
    def record(self) -> FleetRecord:
        """What a resumed fleet knows. Work that is under way is forgotten, as by devices that are restarted."""
        return FleetRecord(
            clock_s=self.clock(), agents={name: agent.record for name, agent in sorted(self._agents.items())}
        )

    def hear(self, client_id: str, message: Message) -> None:
        """Take a message of a client for the server."""
        changed = self._interference.get(client_id)
        for said in (message,) if changed is None else changed.rewrite(message):
            if isinstance(said, get_args(FromDevice)) and said.client_id == client_id:
                self._said.append(plausible(said))

    @property
    def busy(self) -> bool:
        """Whether messages wait for the devices."""
        return bool(self._sent)

    @property
    def digests(self) -> frozenset[str]:
        """See `Link.digests`."""
        offered = [message for message in self._said if isinstance(message, Update)]
        under_way = (update for _, update in self._pulls.values())
        return frozenset(update.blob.sha256 for update in (*offered, *self._pulled, *under_way))

    def open(self) -> None:
        """See `Link.open`; every device joins."""
        alone = [name for name in self._members if name in self._interference]
        together = (member for name, member in self._members.items() if name not in self._interference)
        self._said.append(Joined(profiles=tuple(member.profile for member in together)))
        for name in alone:
            self._wake(name).join()

    def close(self) -> None:
        """See `Link.close`."""

    def receive(self, timeout_s: float) -> Iterator[Arrival]:
        """See `Link.receive`; it never waits."""
        del timeout_s
        said, self._said = self._said, []
        yield from said

    def pull(self, update: Update) -> None:
        """See `Link.pull`. The blob is in the store already, but counts once the device has sent it."""
        self._drop(update.task_id)
        agent = self._agents[update.client_id]
        seconds = agent.timing.transfer_s("up", update.blob.size_bytes, agent.log_time_s)

        def arrive() -> None:
            self._pulls.pop(update.task_id, None)
            self.traffic.count(update.client_id, "received", update.blob.size_bytes)
            self._pulled.append(update)

        if seconds:
            self._pulls[update.task_id] = (self.agenda.add(self.clock() + seconds, arrive), update)
        else:
            arrive()

    def pull_updates(self) -> Iterator[Update]:
        """See `Link.pull_updates`."""
        pulled, self._pulled = self._pulled, []
        yield from pulled

    def ask(self, client_id: str, info: RoundInfo) -> None:
        """See `Link.ask`."""
        self._sent.append((client_id, info))

    def send_task(self, task: Task) -> None:
        """See `Link.send_task`."""
        self._sent.append((task.client_id, task))

    def withdraw(self, task_id: str) -> None:
        """See `Link.withdraw`."""
        kept = (entry for entry in self._sent if not (isinstance(entry[1], Task) and entry[1].task_id == task_id))
        self._sent = deque(kept)
        self._drop(task_id)

    def reply(self, client_id: str, ack: Ack) -> None:
        """See `Link.reply`."""
        self._sent.append((client_id, ack))

    def send(self, info: RoundInfo | None) -> None:
        """See `Link.send`."""
        if info is not None and info.message_id != self._announced:
            self._announced = info.message_id
            self._sent.append(("", info))

    def _announce(self, info: RoundInfo) -> None:
        """Let everyone hear an announcement; members without a task answer together."""
        self._heard = info
        if info.log_time_s is not None:
            self._log_starts_s = info.log_time_s - self.clock()
        self._awake = {name for name in self._awake if name in self._interference or not self._agents[name].idle}
        for name in sorted(self._awake):
            self._hand(self._agents[name], info)
        if info.phase == "measure":
            self._measured, names = info, frozenset(self._members.keys() - self._awake)
            survey = FleetSurvey(info, self._members, names, intermittent=self._intermittent, now_s=self.clock())
            self._said.append(Surveyed(survey=survey))

    def _wake(self, client_id: str) -> EmulatedAgent:
        """The agent of a member, which hears everything from now on until it is idle."""
        agent = self._agents.get(client_id)
        if agent is None:
            agent = self._agents[client_id] = self._create(client_id)
        if client_id not in self._awake:
            self._awake.add(client_id)
            agent.catch_up(self._measured, self._heard, self._log_starts_s)
        return agent

    def _hand(self, agent: EmulatedAgent, message: Message) -> None:
        interference = self._interference.get(agent.settings.client_id)
        if interference is None or interference.accepts(message.KIND):
            agent.receive(message)

    def _drop(self, task_id: str) -> None:
        """Forget an update that has not arrived."""
        if task_id in self._pulls:
            self.agenda.cancel(self._pulls.pop(task_id)[0])
