"""A runtime of programs from arrays to arrays for tests without a device, and loaded programs of any runtime."""

from dataclasses import dataclass
from pathlib import Path

from subfleet.protocol.programs import Program
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.prediction import Model
from subfleet.trainers.program_layout import read_layout
from subfleet.trainers.runtime import CopiedPrograms, LoadProgram, Runtime


@dataclass(frozen=True)
class ArrayRuntime:
    """See `Runtime`; it has no models."""

    load: LoadProgram
    name: str = "arrays"

    def programs(self, threads: int) -> CopiedPrograms:
        return CopiedPrograms(self.load, threads)

    def open_model(self, path: Path, body: bytes, threads: int) -> Model:
        raise NotImplementedError


def loaded_program(runtime: Runtime, program: Program, threads: int = 1) -> Loaded:
    """Load a training program with all its parts."""
    layout, programs = read_layout(program.manifest), runtime.programs(threads)
    load = programs.open(program)
    return Loaded(
        sha256="",
        target=program.manifest.target,
        threads=threads,
        layout=layout,
        programs=programs,
        runs={name: load(name) for name in layout.programs},
    )
