"""The link of a server to devices in its own process: messages are handed over as they are."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, get_args

from subfleet.emulation.batch.agenda import Agenda, LogicalClock
from subfleet.emulation.batch.agents import EmulatedAgent
from subfleet.link.traffic import Traffic
from subfleet.protocol.answers import Update
from subfleet.protocol.messages import Ack, Message, RoundInfo, Task
from subfleet.protocol.plausible import plausible
from subfleet.rounds.signals import FromDevice


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

    Args:
        clock: logical seconds.
        interference: by client id, for clients whose messages are changed.

    Attributes:
        clock: see above.
        agenda: what happens later.
    """

    def __init__(self, clock: LogicalClock, interference: Mapping[str, Interference]) -> None:
        self.traffic = Traffic()
        self.agenda = Agenda()
        self.clock = clock
        self._interference = interference
        self._agents: dict[str, EmulatedAgent] = {}
        self._said: list[FromDevice] = []
        self._pulled: list[Update] = []
        self._sent: deque[tuple[str, Message]] = deque()  # with its receiver; empty for all
        self._announced = ""
        self._pulls: dict[str, tuple[int, Update]] = {}  # by task, with the number in the agenda

    def add(self, agent: EmulatedAgent) -> None:
        """Add a device, before the link is opened."""
        self._agents[agent.settings.client_id] = agent

    def act(self) -> bool:
        """Let every device react to what was sent and to the time; returns whether the server has something to do."""
        while self._sent:
            receiver, message = self._sent.popleft()
            for agent in self._agents.values() if not receiver else [self._agents[receiver]]:
                if self._reaches(agent, message):
                    agent.receive(message)
        self.agenda.run(self.clock())
        return bool(self._said or self._pulled)

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
        for agent in self._agents.values():
            agent.join()

    def close(self) -> None:
        """See `Link.close`."""

    def receive(self, timeout_s: float) -> Iterator[FromDevice]:
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

    def _drop(self, task_id: str) -> None:
        """Forget an update that has not arrived."""
        if task_id in self._pulls:
            self.agenda.cancel(self._pulls.pop(task_id)[0])

    def _reaches(self, agent: EmulatedAgent, message: Message) -> bool:
        interference = self._interference.get(agent.settings.client_id)
        return interference is None or interference.accepts(message.KIND)
