"""A package in a runtime: its programs are loaded on demand, and kept from one job to the next."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from subfleet.protocol.chains import Link
from subfleet.protocol.errors import LoadError, MemoryLimitError, TrainingError
from subfleet.protocol.jobs import AnyJob
from subfleet.trainers.job_files import read_program
from subfleet.trainers.program_layout import ProgramLayout, list_stages
from subfleet.trainers.runtime import Programs, RunProgram

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The loaded programs of a package.

    Attributes:
        sha256: digest of the packed program.
        target: the target of the package.
        threads: number of threads that it runs on.
        layout: the layout of its programs.
        programs: the runtime's container of its programs.
        runs: the loaded programs, by name.
        refused: why the runtime does not load a piece, by the piece's name.
    """

    sha256: str
    target: str
    threads: int
    layout: ProgramLayout
    programs: Programs
    runs: dict[str, RunProgram] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def planned_bytes(self) -> int:
        """Planned memory of the loaded pieces of a chain; 0 for a plain program."""
        loaded = {name.rpartition("/")[0] for name in self.runs}
        return sum(size_bytes for piece, size_bytes in self.layout.chain.runtime_bytes if piece in loaded)

    def load_within(self, links: Sequence[Link], job: AnyJob, *, drops: bool) -> tuple[tuple[Link, ...], int]:
        """Load the operators that fit a job's memory limit; with `drops`, unload all others.

        Returns:
            The links with the operators that fit and that the runtime accepts; and the bytes that the operators of a
            path may keep together.

        Raises:
            MemoryLimitError: not even the smallest path fits.
            LoadError: the runtime refuses the package, or all operators of a link.
            FileError: the packed program cannot be read.
            ProtocolError: it does not match its manifest.
        """
        memory = self.layout.chain.plan_memory(links)
        drawable, left_bytes = memory.select_operators(job.memory_limit_bytes)
        if not drawable:
            # A received manifest alone must not cause allocations.
            raise MemoryLimitError(needed_bytes=memory.least_peak_bytes, limit_bytes=job.memory_limit_bytes)
        drawable = self.load(drawable, job, drops=drops)
        least_bytes = sum(min(operator.kept_bytes for operator in link.operators) for link in drawable)
        if least_bytes > left_bytes:
            needed_bytes = job.memory_limit_bytes + least_bytes - left_bytes
            raise MemoryLimitError(needed_bytes=needed_bytes, limit_bytes=job.memory_limit_bytes)
        return drawable, left_bytes

    def load(self, links: Sequence[Link], job: AnyJob, *, drops: bool) -> tuple[Link, ...]:
        """Load the missing programs of some operators; with `drops`, unload all others.

        Returns:
            The links without operators that the runtime refuses.

        Raises:
            LoadError: it refuses the package, or all operators of a link.
            FileError: the packed program cannot be read.
            ProtocolError: it does not match its manifest.
        """
        needed = {
            stage.operator.piece: self.layout.steps(stage) for stage in list_stages(links) if stage.operator.piece
        }
        names = {name for own in needed.values() for name in own}
        self.runs = {name: run for name, run in self.runs.items() if name in names or not drops}
        lacking = {
            piece: own
            for piece, own in needed.items()
            if piece not in self.refused and not self.runs.keys() >= set(own)
        }
        if lacking:
            self._open(lacking, job)
        return tuple(self._drop_refused(link) for link in links)

    def _open(self, lacking: Mapping[str, tuple[str, ...]], job: AnyJob) -> None:
        try:
            load = self.programs.open(read_program(job.program_path, self.target))
        except TrainingError as error:
            raise LoadError(str(error)) from error
        for piece, names in lacking.items():
            try:
                self.runs |= {name: load(name) for name in names}
            except TrainingError as error:
                self.refused[piece] = str(error)

    def _drop_refused(self, link: Link) -> Link:
        usable = tuple(operator for operator in link.operators if operator.piece not in self.refused)
        for operator in link.operators:
            if operator.piece in self.refused:
                why = self.refused[operator.piece]
                if not link.open:
                    raise LoadError(why)
                if not usable:
                    raise LoadError(f"no operator of link {link.name!r:.80} can be loaded, the last because {why}")
                _LOG.warning("operator %s of %s is never drawn: %s", operator.name, link.name, why)
        return Link(name=link.name, operators=usable)
