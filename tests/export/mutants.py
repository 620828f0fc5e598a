"""Steps with wrong gradients: mutated in their results, or in the step from which a program is written."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from subfleet.export.steps import Step
from subfleet.export.steps.step import StepInputs
from subfleet.export.verification.distances import Distance, Run, Trial, list_failures

Gradients = dict[str, Tensor]
Mutation = Callable[[Gradients], Gradients]


def zeroed(name: str) -> Mutation:
    return lambda gradients: gradients | {name: torch.zeros_like(gradients[name])}


def flipped(name: str) -> Mutation:
    return lambda gradients: gradients | {name: -gradients[name]}


def scaled(name: str) -> Mutation:
    return lambda gradients: gradients | {name: gradients[name] * 1.1}


def exchanged(name: str, other: str) -> Mutation:
    return lambda gradients: gradients | {name: gradients[other], other: gradients[name]}


def rolled(name: str) -> Mutation:
    """Shift the elements by one position."""
    return lambda gradients: gradients | {name: gradients[name].flatten().roll(1).reshape(gradients[name].shape)}


MUTATIONS: Mapping[str, Callable[[str], Mutation]] = MappingProxyType(
    {"zeroed": zeroed, "flipped": flipped, "scaled": scaled}
)
"""Mutations of a single gradient, except swaps."""


def swapped(name: str, gradients: Gradients) -> Mutation | None:
    """A swap with a gradient of the same shape, or a shift, whichever changes the gradient; None if neither does."""
    same_shape = [other for other in gradients if other != name and gradients[other].shape == gradients[name].shape]
    for mutation in [*(exchanged(name, other) for other in same_shape), rolled(name)]:
        change = (mutation(gradients)[name] - gradients[name]).norm()
        if change > 0.1 * gradients[name].norm():
            return mutation
    return None


@contextmanager
def gradients_of(step: Step, change: Mutation) -> Iterator[None]:
    """A context in which every run of the step uses the changed gradients."""
    names = [value.tensor for value in step.inputs if value.role == "parameter"]
    original = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        # While a step is traced, PyTorch calls torch.autograd.grad again.
        with patch.object(torch.autograd, "grad", original):
            gradients = original(*args, **kwargs)
        changed = change({name: part for name, part in zip(names, gradients, strict=True) if part is not None})
        return tuple(changed.get(name) for name in names)

    with patch.object(torch.autograd, "grad", grad):
        yield


class Trained:
    """A step that runs once on each example, however many mutations of its gradients follow."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._known: dict[int, tuple[tuple[Tensor, ...], Gradients]] = {}

    def run(self, example: Sequence[Tensor], mutation: Mutation) -> list[Tensor]:
        """The results of the step's own optimiser with changed gradients."""
        results, gradients = self._of(example)
        changed = mutation(gradients)
        names = set(changed) if self.clips else self.changed(example, mutation)
        pairs = [pair for pair in zip(self.step.inputs, example, strict=True) if pair[0].tensor in {"", *names}]
        inputs = StepInputs([value for value, _ in pairs], [tensor for _, tensor in pairs])
        parameters, *rest = self._run.update(inputs, {name: changed[name] for name in changed if name in names})
        after = iter([*parameters, *(tensor for group in rest for tensor in group)])
        untouched = {"loss", "correct", "count", "buffer"}
        return [
            old if value.role in untouched or value.tensor not in {"", *names} else next(after)
            for value, old in zip(self.step.outputs, results, strict=True)
        ]

    def changed(self, example: Sequence[Tensor], mutation: Mutation) -> set[str]:
        """Names of the parameters with a gradient that the mutation changes."""
        _, gradients = self._of(example)
        return {name for name, part in mutation(gradients).items() if part is not gradients[name]}

    @property
    def _run(self) -> Any:
        return self.step.run

    @property
    def clips(self) -> bool:
        """Whether clipping makes the update of each parameter depend on all gradients."""
        return bool(self._run.optimiser.max_gradient_norm)

    def _of(self, example: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Gradients]:
        key = id(example)
        if key not in self._known:
            seen: list[Gradients] = []

            def record(gradients: Gradients) -> Gradients:
                seen.append(gradients)
                return gradients

            with gradients_of(self.step, record):
                results = self.step.run(*example)
            self._known[key] = results, seen[0]
        return self._known[key]


class Again:
    """A trial that measures only the results that a mutation changed, as it changes little of a network.

    Args:
        trial: The trial to repeat.
        results: Results of the step without a mutation.
    """

    def __init__(self, trial: Trial, results: Sequence[Tensor]) -> None:
        self.example, self.is_whole = trial.example, trial.is_whole
        self._trial = trial
        self._results = tuple(results)
        self._distances = trial.distances(results)

    def measure(self, run: Run) -> list[Distance]:
        """Measure as a trial does."""
        results = run(self.example)
        distances = self._of(results)
        if list_failures(distances) and self._trial.add_references():
            self._distances = self._trial.distances(self._results)
            distances = self._of(results)
        return distances

    def _of(self, results: Sequence[Tensor]) -> list[Distance]:
        known = zip(results, self._results, self._distances, strict=True)
        return [
            distance if result is before else self._trial.distance(index, result)
            for index, (result, before, distance) in enumerate(known)
        ]
