"""The seam to a runtime: a loaded training program that holds what is carried from step to step.

A runtime that only runs a program once, from arrays to arrays, is made one with `hosted`.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from subfleet.arrays import numpy_dtype
from subfleet.protocol.programs import Program, ValueInfo

__all__ = ["Array", "LoadProgram", "OpenSession", "RunProgram", "SessionLayout", "StepSession", "hosted", "zeros"]

Array = npt.NDArray[np.generic]

RunProgram = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Runs a loaded program once: inputs by name to outputs by name, which may be the runtime's until it runs again.

Raises TrainingError where the runtime fails.
"""

LoadProgram = Callable[[Program, int], RunProgram]
"""Loads a program to run on a number of threads; raises TrainingError where the runtime refuses it."""


class SessionLayout(Protocol):
    """What a session must know of its program: what is carried from step to step, and what is read."""

    @property
    def stored(self) -> tuple[ValueInfo, ...]:
        """Parameters and buffers that steps change, as inputs."""
        ...

    @property
    def zeroed(self) -> tuple[ValueInfo, ...]:
        """What is carried, too, and starts at zero, as inputs."""
        ...

    @property
    def gradients(self) -> tuple[ValueInfo, ...]:
        """Of these, gradients that are summed over the parts of a batch."""
        ...

    @property
    def carried(self) -> Mapping[str, str]:
        """Name of each stored and zeroed value's input to the name of the output that holds it after the step."""
        ...

    @property
    def read(self) -> tuple[str, ...]:
        """Names of the outputs that are read after every step."""
        ...


class StepSession(Protocol):
    """A loaded program, which trains or evaluates any number of times: `begin`, steps, `finish`, and again.

    After an error it is not used any more.
    """

    def begin(self, stored: Mapping[str, Array], constants: Mapping[str, Array]) -> None:
        """Start a training.

        Args:
            stored: the layout's `stored` values by input name; they are copied. What the layout calls `zeroed` starts
                at zero.
            constants: what is fed alike with every step, such as anchors, or the weights of an evaluation, by input
                name; not to be changed until `finish`.
        """
        ...

    def step(self, fed: Mapping[str, Array], *, last: bool = False) -> Mapping[str, Array]:
        """Run the program once.

        Args:
            fed: everything else that the program takes, by input name.
            last: of this training, so that memory that only steps need may be given back.

        Returns:
            The layout's `read` values by output name.

        Raises:
            TrainingError: the runtime failed.
        """
        ...

    def gradients(self) -> Mapping[str, Array]:
        """Copies of the sums that the layout calls `gradients`, by tensor name, as the last step left them."""
        ...

    def finish(self) -> Mapping[str, Array]:
        """End a training: the `stored` values as they stand, the caller's to change; everything else is given back."""
        ...


OpenSession = Callable[[Program, SessionLayout, int], StepSession]
"""Loads a program to run on a number of threads; raises TrainingError where the runtime refuses it."""


def hosted(load: LoadProgram) -> OpenSession:
    """A session of a runtime that runs programs from arrays to arrays."""

    def open_session(program: Program, layout: SessionLayout, threads: int) -> StepSession:
        return _HostedSession(load(program, threads), layout)

    return open_session


class _HostedSession:
    """Copies what is carried from the outputs of one run to the inputs of the next, which stay where they are."""

    def __init__(self, run: RunProgram, layout: SessionLayout) -> None:
        self._run = run
        self._layout = layout
        self._carried: dict[str, Array] = {}
        self._constants: Mapping[str, Array] = {}

    def begin(self, stored: Mapping[str, Array], constants: Mapping[str, Array]) -> None:
        self._constants = constants
        self._carried = {name: array.copy() for name, array in stored.items()} | zeros(self._layout)

    def step(self, fed: Mapping[str, Array], *, last: bool = False) -> Mapping[str, Array]:
        del last
        outputs = self._run({**self._constants, **self._carried, **fed})
        for old, new in self._layout.carried.items():
            self._carried[old][...] = outputs[new]
        return {name: np.array(outputs[name]) for name in self._layout.read}

    def gradients(self) -> Mapping[str, Array]:
        return {value.tensor: np.array(self._carried[value.name]) for value in self._layout.gradients}

    def finish(self) -> Mapping[str, Array]:
        carried, self._carried, self._constants = self._carried, {}, {}
        return {value.name: carried[value.name] for value in self._layout.stored}


def zeros(layout: SessionLayout) -> dict[str, Array]:
    """What starts at zero, by input name; the system gives such memory only when it is first written."""
    return {value.name: np.zeros(value.shape, numpy_dtype(value.dtype)) for value in layout.zeroed}
