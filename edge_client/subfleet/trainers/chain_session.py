"""Trains along paths of a chain: forward, with each link's input kept; back, each link computed again; then the update.

An operator that a batch does not go through stays as it is, its optimiser states with it (FedorAS, section 3.1).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from subfleet.arrays import numpy_dtype
from subfleet.protocol.programs import PieceProgram, Role
from subfleet.trainers.chain_layout import ChainLayout, Place
from subfleet.trainers.sessions import Array, RunProgram
from subfleet.trainers.step_layout import carried_values

__all__ = ["ChainSession", "Path"]

Path = Sequence[Place]
"""One way through each link, in their order."""
_Floats = npt.NDArray[np.float32]
_DIVISOR_GUARD = 1e-6
"""Of `torch.nn.utils.clip_grad_norm_`."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """What is held of one operator: arrays that no one else writes to.

    Attributes:
        tensors: parameters and buffers, by the piece's name of the tensor.
        states: of the optimiser, by the name of the update's input.
        gradients: of the batch so far, by the piece's name of the tensor.
    """

    tensors: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Array] = field(default_factory=dict)
    gradients: dict[str, _Floats] = field(default_factory=dict)

    def fed(self, program: PieceProgram, passed: Mapping[Role, Array]) -> dict[str, Array]:
        """What one of the operator's programs takes, by the names of its inputs."""
        found: dict[str, Array] = {}
        for value in program.inputs:
            match value.role:
                case "parameter" | "buffer":
                    found[value.name] = self.tensors[value.tensor]
                case "optimiser_state":
                    found[value.name] = self.states[value.name]
                case "gradient":
                    found[value.name] = self.gradients[value.tensor]
                case role:
                    found[value.name] = passed[role]
        return found

    def take(self, program: PieceProgram, given: Mapping[str, Array]) -> dict[Role, Array]:
        """Hold what one of the operator's programs has given of the operator; the rest is for others."""
        rest: dict[Role, Array] = {}
        states = {new: old for old, new in carried_values(program.inputs, program.outputs, ["optimiser_state"]).items()}
        for value in program.outputs:
            array = given[value.name]
            match value.role:
                case "parameter" | "buffer":
                    self.tensors[value.tensor] = array
                case "optimiser_state":
                    self.states[states[value.name]] = array
                case "gradient" if value.tensor in self.gradients:
                    self.gradients[value.tensor] += np.asarray(array, np.float32)  # to those of the batch's other parts
                case "gradient":
                    self.gradients[value.tensor] = np.asarray(array, np.float32)
                case role:
                    rest[role] = array
        return rest


class ChainSession:
    """The weights, buffers and optimiser states of a subspace, and the programs that change them.

    Args:
        layout: of the chain.
        runs: the loaded programs by name; what they give is the caller's for good.
        places: all ways through the subspace's links.
        weights: of all of them, by the supernet's names; held as they are, and never written to.
    """

    def __init__(
        self,
        layout: ChainLayout,
        runs: Mapping[str, RunProgram],
        places: Iterable[Place],
        weights: Mapping[str, Array],
    ) -> None:
        self._layout = layout
        self._runs = runs
        self._held = {place: _begun(layout, place, weights) for place in places}

    def step(
        self, path: Path, fed: Mapping[Role, Array], *, updates: bool = True, max_gradient_norm: float = 0.0
    ) -> Mapping[str, Array]:
        """Train with a batch, or with a part of one.

        Args:
            path: of the batch, the same for all of its parts.
            fed: input, label, sample mask, batch weight and learning rate.
            updates: whether the optimiser takes its step: in the last part.
            max_gradient_norm: as in `OptimiserSettings`.

        Returns:
            What is read, by the names that the whole chain has for it.

        Raises:
            TrainingError: the runtime failed.
        """
        computing = [place for place in path if place.operator.piece]
        read = self._back(computing, fed, self._forward(computing, fed))
        if updates:
            self._update(computing, fed, max_gradient_norm)
        return self._named(read)

    def evaluate(self, path: Path, fed: Mapping[Role, Array]) -> Mapping[str, Array]:
        """What an evaluation tells of a batch, by the names that the whole chain has for it; raises as `step`."""
        given: Mapping[Role, Array] = {}
        for place in path:
            for name in self._layout.steps(place):
                given = self._run(place, name, {**fed, **given})
        return self._named(given)

    def finish(self) -> dict[str, Array]:
        """The weights and buffers as they stand, by the supernet's names; nothing is held any more."""
        held, self._held = self._held, {}
        return {
            f"{place.operator.prefix}{name}": array
            for place, own in held.items()
            for name, array in own.tensors.items()
        }

    def _forward(self, path: Path, fed: Mapping[Role, Array]) -> list[Array]:
        """What each link reads, from the second on: the first one reads the batch, and the loss is left out."""
        features: list[Array] = []
        for place in path[:-1]:
            passed = {**fed, "features": features[-1]} if features else fed
            features.append(self._run(place, place.program("forward"), passed)["features"])
        return features

    def _back(self, path: Path, fed: Mapping[Role, Array], features: list[Array]) -> Mapping[Role, Array]:
        """Add up the gradients of all links, from the loss on; what the loss has told."""
        told: Mapping[Role, Array] = {}
        passed: dict[Role, Array] = {}
        for place in reversed(path):
            if features:
                passed["features"] = features.pop()
            given = self._run(place, place.program("backward"), {**fed, **passed})
            told = told or {role: array for role, array in given.items() if role in self._layout.told}
            passed = {role: array for role, array in given.items() if role == "features_gradient"}
        return told

    def _update(self, path: Path, fed: Mapping[Role, Array], max_gradient_norm: float) -> None:
        scale = 1.0
        if max_gradient_norm:
            norm = sum(_square_sum(array) for place in path for array in self._held[place].gradients.values()) ** 0.5
            scale = min(1.0, max_gradient_norm / (norm + _DIVISOR_GUARD))
        passed: dict[Role, Array] = {**fed, "gradient_scale": np.array(scale, np.float32)}
        for place in path:
            if self._held[place].gradients:
                self._run(place, place.program("update"), passed)
                self._held[place].gradients.clear()

    def _run(self, place: Place, name: str, passed: Mapping[Role, Array]) -> dict[Role, Array]:
        program, held = self._layout.programs[name], self._held[place]
        return held.take(program, self._runs[name](held.fed(program, passed)))

    def _named(self, told: Mapping[Role, Array]) -> Mapping[str, Array]:
        return {name: told[role] for role, name in self._layout.told.items()}


def _begun(layout: ChainLayout, place: Place, weights: Mapping[str, Array]) -> _Held:
    held = _Held()
    for value in layout.tensors(place):
        if value.role in ("parameter", "buffer"):
            held.tensors[value.tensor] = weights[f"{place.operator.prefix}{value.tensor}"]
        elif value.role == "optimiser_state":
            held.states[value.name] = np.zeros(value.shape, numpy_dtype(value.dtype))
    return held


def _square_sum(array: _Floats) -> float:
    flat = array.reshape(-1)
    # Made double bit by bit, where a square of its own would take twice the gradient's memory.
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))
