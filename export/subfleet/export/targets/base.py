"""The interface between an export and the format that a device's runtime reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from torch import Tensor, fx

from subfleet.export.steps.step import Step
from subfleet.protocol.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenProgram:
    """A program, and the memory that a device needs to run it.

    Attributes:
        body: as the runtime loads it.
        memory: of a device's process that loads it and runs its steps.
        operators: that its runtime must have, sorted.
    """

    body: bytes
    memory: MemoryPlan
    operators: tuple[str, ...]


class Target(Protocol):
    """A format. Its implementations are listed in `subfleet.export.targets.TARGETS`.

    Attributes:
        name: as in a request.
        lowerings: of a training step.
        inference_lowerings: of a step of inference or evaluation, where the runtime's own kernels may do more.
        inference_batch_size: of the inference step that is traced.
        any_inference_batch: whether an inference model may then take batches of any size.
    """

    name: ClassVar[str]
    lowerings: ClassVar[Mapping[Any, Callable[..., Any]]]
    inference_lowerings: ClassVar[Mapping[Any, Callable[..., Any]]]
    inference_batch_size: ClassVar[int]
    any_inference_batch: ClassVar[bool]

    def write_training(self, graph: fx.GraphModule, step: Step) -> WrittenProgram:
        """Write a step that is fed its weights, of training or evaluation.

        Raises:
            ExportError: the format has no equivalent of an operator.
        """
        ...

    def write_inference(
        self,
        graph: fx.GraphModule,
        step: Step,
        weights: Sequence[Tensor],
        *,
        any_batch: bool,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Write an inference step together with its weights, in the order of its inputs after the first.

        The model takes batches of the step's size, or of any size with `any_batch`, if the target supports that. It
        carries notes, texts by name; see `subfleet.protocol.model_notes`.
        """
        ...

    def run(self, body: bytes, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run a program once, with inputs by name in the program's order."""
        ...
