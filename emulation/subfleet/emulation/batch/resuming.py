"""What a batch keeps of itself after each round, so that a stopped or killed one goes on from there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from subfleet.emulation.batch.memory_journal import list_open_digests
from subfleet.journal.base import AnyRecord, Bytes
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.journal import Journal, open_journal
from subfleet.journal.networks import GenerationRecord
from subfleet.journal.records import RoundRecord
from subfleet.protocol.disks import write_atomically
from subfleet.protocol.errors import explain_os_errors
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.rounds.signals import AnyClose
from subfleet.rounds.state import RunState
from subfleet.settings.run import Run

_FLEET = "fleet.json"
_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """What a device knows after a restart.

    Attributes:
        done: as in `AgentState`, like programs and frozen.
        held_bytes: size of each blob on its disk, by digest, the least recently used first.
    """

    done: tuple[str, ...]
    programs: tuple[str, ...]
    frozen: tuple[str, ...]
    held_bytes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """An emulated fleet between two rounds.

    Attributes:
        clock_s: logical time.
        agents: by client id, those that have had a task.
    """

    clock_s: float = 0.0
    agents: Mapping[str, AgentRecord]

    def write(self, folder: Path) -> None:
        """Write it to a folder. Raises FileError."""
        path = folder / _FLEET
        with explain_os_errors(f"{path} cannot be written", "make room for it"):
            write_atomically(path, [canonical_json(self)])


def read_fleet(folder: Path | None) -> FleetRecord:
    """The fleet as it was last written to a folder; a new one if it never was.

    Raises:
        FileError: it cannot be read.
    """
    path = None if folder is None else folder / _FLEET
    if path is None or not path.exists():
        return FleetRecord(agents={})
    with explain_os_errors(f"{path} cannot be read", "remove its folder to begin anew"):
        content = path.read_bytes()
    return from_plain(FleetRecord, parse_json(content, max_bytes=_MAX_BYTES), where=str(path))


class RoundJournal:
    """See `RunJournal`. Steps are kept in memory, and written when a round, an evaluation or a generation is closed.

    Args:
        journal: what is written to.
    """

    def __init__(self, journal: Journal) -> None:
        self.run_id = journal.run_id
        self._journal = journal
        self._written = self._state = RunState()

    def close(self) -> None:
        """See `RunJournal.close`."""
        self._journal.close()

    def load(self, now_s: float) -> RunState:
        """See `RunJournal.load`; it is the state after the last close.

        What was under way between two asynchronous rounds is forgotten: restarted devices would not know it.
        """
        loaded = self._journal.load(now_s)
        closed = {name: client for name, client in loaded.clients.items() if not client.open}
        self._written = self._state = replace(loaded, clients=MappingProxyType(closed))
        return self._state

    def records(self) -> tuple[RoundRecord, ...]:
        """See `RunJournal.records`."""
        return self._journal.records()

    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        """See `RunJournal.evaluations`."""
        return self._journal.evaluations()

    def generations(self) -> tuple[GenerationRecord, ...]:
        """See `RunJournal.generations`."""
        return self._journal.generations()

    def checkpoint_sha256(self, round_number: int) -> str | None:
        """See `RunJournal.checkpoint_sha256`."""
        return self._journal.checkpoint_sha256(round_number)

    def update_digests(self, *, since_round: int) -> set[str]:
        """See `RunJournal.update_digests`; those of the open round are enough, because it is repeated as a whole."""
        del since_round
        return list_open_digests(self._state)

    def load_bytes(self, at: RunState) -> dict[str, Bytes]:
        """See `RunJournal.load_bytes`."""
        del at
        return {}

    def save_absences(self, away: object) -> None:
        """See `RunJournal.save_absences`; nobody asks for them."""

    def save(
        self,
        before: RunState,
        after: RunState,
        *,
        counted: Callable[[str], Bytes] = lambda client_id: (0, 0),
        close: AnyClose | None = None,
        record: AnyRecord | None = None,
    ) -> None:
        """See `RunJournal.save`."""
        del before
        self._state = after
        if record is not None or after.phase in ("finished", "failed"):
            self._journal.save(self._written, after, counted=counted, close=close, record=record)
            self._written = after


def open_round_journal(folder: Path, run: Run) -> RoundJournal:
    """Open the journal of a batch in a folder; see `open_journal`."""
    return RoundJournal(open_journal(folder, run, run_id=run.name))


@contextmanager
def link_scratch(folder: Path, scratch: Path) -> Iterator[None]:
    """A context in which the blobs and models of a state folder are in a scratch folder.

    Raises:
        FileError: the state folder cannot be used.
    """
    links = {folder / name: scratch / name for name in ("blobs", "models")}
    with explain_os_errors(f"the folder {folder} cannot be used", "choose another --runs"):
        folder.mkdir(parents=True, exist_ok=True)
        for link, target in links.items():
            target.mkdir()
            link.unlink(missing_ok=True)  # of a batch that was killed
            link.symlink_to(target, target_is_directory=True)
    try:
        yield
    finally:
        for link in links:
            link.unlink(missing_ok=True)
