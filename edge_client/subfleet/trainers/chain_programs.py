"""The programs of a chain in a runtime: loaded where a job needs them, and kept from one job to the next."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from subfleet.protocol.chains import Link
from subfleet.protocol.errors import LoadError, ProtocolError, TrainingError
from subfleet.protocol.memory import MemoryPlan
from subfleet.protocol.programs import Program
from subfleet.protocol.tensors import decode_container
from subfleet.trainers.chain_layout import ChainLayout, places_of
from subfleet.trainers.job_files import read_program
from subfleet.trainers.sessions import LoadProgram, RunProgram

__all__ = ["LoadPiece", "LoadedChain", "OpenPieces", "PieceRuntime", "hosted_pieces", "opened"]

_LOG = logging.getLogger(__name__)

LoadPiece = Callable[[str], RunProgram]
"""Loads a program of a chain by its name; what that gives is the caller's for good.

Raises TrainingError where the runtime refuses it, and ProtocolError where the chain's body lacks it.
"""


class PieceRuntime(Protocol):
    """The seam to a runtime that runs the programs of chains, one at a time."""

    def open(self, chain: Program) -> LoadPiece:
        """What loads the programs of a packed chain; raises ProtocolError where its body is none."""
        ...

    def rest(self) -> None:
        """Give back the memory that only runs need; others may follow."""
        ...


OpenPieces = Callable[[int], PieceRuntime]
"""A runtime for programs that run on a number of threads."""


def opened(chain: Program) -> Callable[[str], Program]:
    """The programs in a chain's body, by name; each is planned with what the largest takes.

    Raises:
        ProtocolError: the body is no container; in a call, it lacks the program.
    """
    bodies = decode_container(chain.body).tensors
    pieces = {piece.name: piece for piece in chain.manifest.pieces}
    links = () if chain.manifest.chain is None else chain.manifest.chain.links
    memory = MemoryPlan(activation_bytes=max((one.peak_bytes for link in links for one in link.operators), default=0))

    def program(name: str) -> Program:
        if name not in bodies:
            raise ProtocolError(f"the chain's body has no program {name!r:.120}; it must be exported again")
        inputs, outputs = pieces[name].inputs, pieces[name].outputs
        manifest = replace(chain.manifest, inputs=inputs, outputs=outputs, memory=memory, chain=None, pieces=())
        return Program(manifest=manifest, body=bodies[name].data)

    return program


def hosted_pieces(load: LoadProgram) -> OpenPieces:
    """A runtime that runs programs from arrays to arrays, which may be its own until it runs again."""
    return lambda threads: _HostedPieces(load, threads)


class _HostedPieces:
    def __init__(self, load: LoadProgram, threads: int) -> None:
        self._load = load
        self._threads = threads

    def open(self, chain: Program) -> LoadPiece:
        program = opened(chain)

        def load(name: str) -> RunProgram:
            run = self._load(program(name), self._threads)
            return lambda values: {name: np.array(array) for name, array in run(values).items()}

        return load

    def rest(self) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class LoadedChain:
    """What is kept of a chain.

    Attributes:
        sha256: of the packed program.
        threads: that it runs on.
        layout: of the chain.
        runtime: that runs its programs.
        runs: those that are loaded, by name.
        refused: why the runtime does not load a piece, by the piece's name.
    """

    sha256: str
    threads: int
    layout: ChainLayout
    runtime: PieceRuntime
    runs: dict[str, RunProgram] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def planned_bytes(self) -> int:
        """What the runtime is planned to take for what is loaded."""
        loaded = {name.rpartition("/")[0] for name in self.runs}
        return sum(size_bytes for piece, size_bytes in self.layout.chain.runtime_bytes if piece in loaded)

    def hold(self, links: Sequence[Link], program_path: Path, target: str, *, drops: bool = True) -> tuple[Link, ...]:
        """Load the programs of some operators where they are not.

        Args:
            links: with the operators that a job goes through.
            program_path: the packed program.
            target: of it.
            drops: whether all others go.

        Returns:
            The links without operators that the runtime refuses.

        Raises:
            LoadError: it refuses the chain, or all operators of a link.
            FileError: the packed program cannot be read.
            ProtocolError: it is no chain's.
        """
        wanted = {place.operator.piece: self.layout.steps(place) for place in places_of(links) if place.operator.piece}
        names = {name for own in wanted.values() for name in own}
        self.runs = {name: run for name, run in self.runs.items() if name in names or not drops}
        lacking = {
            piece: own
            for piece, own in wanted.items()
            if piece not in self.refused and not self.runs.keys() >= set(own)
        }
        if lacking:
            try:
                load = self.runtime.open(read_program(program_path, target))
            except TrainingError as error:
                raise LoadError(str(error)) from error
            self._load(lacking, load)
        return tuple(self._without_refused(link) for link in links)

    def _load(self, lacking: Mapping[str, tuple[str, ...]], load: LoadPiece) -> None:
        for piece, names in lacking.items():
            try:
                self.runs |= {name: load(name) for name in names}
            except TrainingError as error:
                self.refused[piece] = str(error)

    def _without_refused(self, link: Link) -> Link:
        left = tuple(one for one in link.operators if one.piece not in self.refused)
        for one in link.operators:
            if one.piece in self.refused:
                why = self.refused[one.piece]
                if not left:
                    raise LoadError(f"no operator of link {link.name!r:.80} can be loaded, the last because {why}")
                _LOG.warning("operator %s of %s is never drawn: %s", one.name, link.name, why)
        return Link(name=link.name, operators=left)
