"""Steps whose gradients are wrong: mutated in their results, and in the step that a program is written from."""

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
    """Elements change their places."""
    return lambda gradients: gradients | {name: gradients[name].flatten().roll(1).reshape(gradients[name].shape)}


MUTATIONS: Mapping[str, Callable[[str], Mutation]] = MappingProxyType(
    {"zeroed": zeroed, "flipped": flipped, "scaled": scaled}
)
"""Those of one parameter alone, besides swaps."""


def swapped(name: str, gradients: Gradients) -> Mutation | None:
    """With a gradient of that shape or within itself, whatever changes it; None where nothing does."""
    others = [other for other in gradients if other != name and gradients[other].shape == gradients[name].shape]
    for mutation in [*(exchanged(name, other) for other in others), rolled(name)]:
        change = (mutation(gradients)[name] - gradients[name]).norm()
        if change > 0.1 * gradients[name].norm():
            return mutation
    return None


@contextmanager
def gradients_of(step: Step, change: Mutation) -> Iterator[None]:
    """While it is entered, whatever runs the step goes on with changed gradients."""
    names = [value.tensor for value in step.inputs if value.role == "parameter"]
    original = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        # While a step is traced, PyTorch comes back to the function of this name.
        with patch.object(torch.autograd, "grad", original):
            found = original(*args, **kwargs)
        changed = change({name: part for name, part in zip(names, found, strict=True) if part is not None})
        return tuple(changed.get(name) for name in names)

    with patch.object(torch.autograd, "grad", grad):
        yield


class Trained:
    """A step that is run on each example once, whatever is then made of its gradients."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._known: dict[int, tuple[tuple[Tensor, ...], Gradients]] = {}

    def run(self, example: Sequence[Tensor], mutation: Mutation) -> list[Tensor]:
        """The step's results with changed gradients, by its own optimiser."""
        results, gradients = self._of(example)
        changed = mutation(gradients)
        names = set(changed) if self.clips else self.changed(example, mutation)
        pairs = [pair for pair in zip(self.step.inputs, example, strict=True) if pair[0].tensor in {"", *names}]
        given = StepInputs([value for value, _ in pairs], [tensor for _, tensor in pairs])
        parameters, *rest = self._run.update(given, {name: changed[name] for name in changed if name in names})
        after = iter([*parameters, *(tensor for group in rest for tensor in group)])
        untouched = {"loss", "correct", "count", "buffer"}
        return [
            old if value.role in untouched or value.tensor not in {"", *names} else next(after)
            for value, old in zip(self.step.outputs, results, strict=True)
        ]

    def changed(self, example: Sequence[Tensor], mutation: Mutation) -> set[str]:
        """Names of the parameters whose gradients it changes."""
        _, gradients = self._of(example)
        return {name for name, part in mutation(gradients).items() if part is not gradients[name]}

    @property
    def _run(self) -> Any:
        return self.step.run

    @property
    def clips(self) -> bool:
        """Whether a gradient changes what is made of the others."""
        return bool(self._run.optimiser.max_gradient_norm)

    def _of(self, example: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Gradients]:
        key = id(example)
        if key not in self._known:
            seen: list[Gradients] = []

            def kept(gradients: Gradients) -> Gradients:
                seen.append(gradients)
                return gradients

            with gradients_of(self.step, kept):
                results = self.step.run(*example)
            self._known[key] = results, seen[0]
        return self._known[key]


class Again:
    """A trial that measures only what differs from the first results, as a mutation changes little of a network.

    Args:
        trial: to be held against.
        results: of the step as it is.
    """

    def __init__(self, trial: Trial, results: Sequence[Tensor]) -> None:
        self.example, self.is_whole = trial.example, trial.is_whole
        self._trial = trial
        self._results = tuple(results)
        self._found = trial.distances(results)

    def measure(self, run: Run) -> list[Distance]:
        """As a trial does."""
        results = run(self.example)
        distances = self._of(results)
        if list_failures(distances) and self._trial.add_references():
            self._found = self._trial.distances(self._results)
            distances = self._of(results)
        return distances

    def _of(self, results: Sequence[Tensor]) -> list[Distance]:
        known = zip(results, self._results, self._found, strict=True)
        return [
            found if result is before else self._trial.distance(place, result)
            for place, (result, before, found) in enumerate(known)
        ]
