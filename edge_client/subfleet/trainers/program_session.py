"""Runs batches along paths: forward, keeping each link's input; backward, recomputing each link; then the update.

An operator that a batch does not pass keeps its weights and optimiser states (FedorAS, section 3.1). The only path of a
plain program takes one run for each batch. There two sets of buffers alternate as inputs and outputs of a step, so that
nothing is copied or allocated between steps.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from subfleet.protocol.chains import Link
from subfleet.protocol.programs import Role, ValueInfo
from subfleet.trainers.layouts import StepLayout
from subfleet.trainers.loaded import Loaded
from subfleet.trainers.program_layout import Key, Path, ProgramValues, Stage, list_stages
from subfleet.trainers.runtime import Array, Operands, Value, copy_array, make_zeros

_Floats = npt.NDArray[np.float32]
_SETS = 2
"""Number of buffers; they alternate if a runtime writes into them."""
_DIVISOR_GUARD = 1e-6
"""The constant of `torch.nn.utils.clip_grad_norm_`."""


class ProgramSession:
    """The weights, buffers and optimiser states of a subspace, and the loaded programs that change them.

    It cannot be used after an error.

    Args:
        loaded: the package, with the programs of all operators on paths.
        links: the links of the subspace.
        weights: the weights of all its operators, by the network's names. A training copies them, an evaluation holds
            them.
        constants: inputs that are the same for every batch, by the names of the whole package's inputs.
    """

    def __init__(
        self,
        loaded: Loaded,
        links: Sequence[Link],
        weights: Mapping[str, Array],
        constants: Mapping[str, Array],
    ) -> None:
        self._layout = loaded.layout
        self._programs = loaded.programs
        self._runs = loaded.runs
        self._trains = isinstance(self._layout.values, StepLayout)
        self._reported = tuple(self._layout.read_outputs.items())
        self._constants = {name: self._programs.hold(array) for name, array in constants.items()}
        self._held = {stage: self._hold_first(stage, weights) for stage in list_stages(links)}
        self._spare: dict[Key, Value] = self._make_twins() if self._layout.plain else {}
        self._turns: list[Operands] = []

    def step(
        self,
        path: Path,
        fed: Mapping[str, Array],
        *,
        updates: bool = True,
        last: bool = False,
        max_gradient_norm: float = 0.0,
    ) -> Mapping[str, Array]:
        """Train on a batch, or on a part of one.

        Args:
            path: the path of the batch, the same for all of its parts.
            fed: inputs that change from batch to batch, by the names of the whole package's inputs.
            updates: whether the optimiser takes its step, which it does in the last part; an input of plain programs.
            last: whether it is the last step of this training.
            max_gradient_norm: as in `OptimiserSettings`; a plain program clips by itself.

        Returns:
            The read outputs, by the names of the whole package's outputs.

        Raises:
            TrainingError: the runtime failed.
        """
        computing = [stage for stage in path if stage.operator.piece]
        updated = [stage for stage in computing if updates and self._layout.updates(stage)]
        features = self._run_forward(computing, fed)
        outputs = self._run_backward(computing, fed, features, last=last and not updated)
        if updated:
            self._update(updated, fed, max_gradient_norm, last=last)
        return outputs

    def evaluate(self, path: Path, fed: Mapping[str, Array], *, last: bool = False) -> Mapping[str, Array]:
        """Evaluate a batch; returns the outputs by the names of the whole package. Raises as `step`."""
        outputs: Mapping[Role, Value] = {}
        steps = [(stage, name) for stage in path for name in self._layout.steps(stage)]
        for stage, name in steps:
            outputs = self._run(stage, name, fed, outputs, last=last and (stage, name) == steps[-1])
        return self._read_outputs(outputs)

    def gradients(self) -> Mapping[str, Array]:
        """Copy the summed gradients of the last step, by the network's names."""
        return self._collect("gradient", copies=True)

    def finish(self) -> dict[str, Array]:
        """Return weights and buffers by the network's names, and release everything."""
        # The spare set is freed first, so that a copy from another device can use its memory.
        self._spare, self._constants, self._turns = {}, {}, []
        state = self._collect("parameter", "buffer")
        self._held = {}
        return state

    def _collect(self, *roles: Role, copies: bool = False) -> dict[str, Array]:
        return {
            f"{stage.operator.prefix}{name}": np.array(array) if copies else array
            for stage, held in self._held.items()
            for (role, name), value in held.items()
            if role in roles
            for array in (self._programs.array(value),)
        }

    def _hold_first(self, stage: Stage, weights: Mapping[str, Array]) -> dict[Key, Value]:
        """Make the held values of an operator before the first batch."""
        held: dict[Key, Value] = {}
        for name in self._layout.steps(stage):
            program, carried = self._layout.programs[name], {key for _, key in self._layout.sources[name].carried}
            keys = dict(self._layout.sources[name].held)
            for value in program.inputs:
                key = keys.get(value.name)
                if key is None or key in held or (value.role == "gradient" and key not in carried):
                    continue
                held[key] = self._programs.hold(self._make_first(stage, value, weights))
        return held

    def _make_first(self, stage: Stage, value: ValueInfo, weights: Mapping[str, Array]) -> Array:
        if value.role not in ("parameter", "buffer"):
            return make_zeros(value)
        array = weights[f"{stage.operator.prefix}{value.tensor}"]
        return copy_array(array) if self._trains else array

    def _make_twins(self) -> dict[Key, Value]:
        """Make the second set of carried values, if the runtime writes into one."""
        carried = {key for values in self._layout.sources.values() for _, key in values.carried}
        twins = {
            key: self._programs.twin(value)
            for own in self._held.values()
            for key, value in own.items()
            if key in carried
        }
        return {key: value for key, value in twins.items() if value is not None}

    def _run_forward(self, path: Path, fed: Mapping[str, Value]) -> list[Value]:
        """Compute the input of each link from the second on."""
        features: list[Value] = []
        for stage in path[:-1]:
            passed: dict[Role, Value] = {"features": features[-1]} if features else {}
            features.append(self._run(stage, stage.program("forward"), fed, passed)["features"])
        return features

    def _run_backward(
        self, path: Path, fed: Mapping[str, Value], features: list[Value], *, last: bool
    ) -> Mapping[str, Array]:
        """Sum the gradients of all links, from the loss on; returns the outputs of the loss."""
        outputs: Mapping[str, Array] = {}
        passed: dict[Role, Value] = {}
        for stage in reversed(path):
            if features:
                passed["features"] = features.pop()
            results = self._run(stage, stage.program("backward"), fed, passed, last=last and stage is path[0])
            outputs = outputs or self._read_outputs(results)
            passed = {role: value for role, value in results.items() if role == "features_gradient"}
        return outputs

    def _update(self, path: Path, fed: Mapping[str, Value], max_gradient_norm: float, *, last: bool) -> None:
        scale = 1.0
        gradients = {stage: [key for key in self._held[stage] if key[0] == "gradient"] for stage in path}
        if max_gradient_norm:
            norm = sum(_sum_squares(self._held[stage][key]) for stage, keys in gradients.items() for key in keys) ** 0.5
            scale = min(1.0, max_gradient_norm / (norm + _DIVISOR_GUARD))
        passed: dict[Role, Value] = {"gradient_scale": np.array(scale, np.float32)}
        for stage in path:
            self._run(stage, stage.program("update"), fed, passed, last=last and stage is path[-1])
            for key in gradients[stage]:
                del self._held[stage][key]

    def _run(
        self, stage: Stage, name: str, fed: Mapping[str, Value], passed: Mapping[Role, Value], *, last: bool = False
    ) -> dict[Role, Value]:
        """Run a program of an operator, hold the operator's outputs, and return the others."""
        sources, held = self._layout.sources[name], self._held[stage]
        operands = self._turns.pop(0) if len(self._turns) == _SETS else self._make_operands(sources, held, passed)
        if not self._layout.plain:
            fed = {own: fed[source] for own, source in sources.fed if source in fed}
        results = self._runs[name](operands, fed, last=last)
        if operands.spare:
            self._turns.append(operands)
        for own, key in sources.carried:
            if own in operands.spare:
                self._spare[key] = held[key]
            held[key] = results[own]
        for own, key in sources.summed:
            gradient = np.asarray(self._programs.array(results[own]), np.float32)
            if key in held:
                held[key] += gradient  # to the sums of the batch's other parts
            else:
                held[key] = gradient
        return {role: results[own] for own, role in sources.returned}

    def _make_operands(
        self, sources: ProgramValues, held: Mapping[Key, Value], passed: Mapping[Role, Value]
    ) -> Operands:
        values = {own: held[key] for own, key in sources.held}
        values |= {own: self._constants[source] for own, source in sources.fed if source in self._constants}
        values |= {own: passed[role] for own, role in sources.passed}
        spare = {own: self._spare[key] for own, key in sources.carried if key in self._spare}
        return Operands(values=values, spare=spare)

    def _read_outputs(self, results: Mapping[Role, Value]) -> Mapping[str, Array]:
        return {name: self._programs.array(results[role]) for role, name in self._reported if role in results}


def _sum_squares(array: _Floats) -> float:
    flat = array.reshape(-1)
    # Converted to double piece by piece, as a square of the whole would take twice the gradient's memory.
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))
