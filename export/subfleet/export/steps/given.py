"""What a step is given, by role and by name."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from subfleet.protocol.programs import Role, ValueInfo

__all__ = ["StepInputs"]


class StepInputs:
    """A step's input tensors by role.

    Args:
        values: the step's inputs.
        tensors: one for each.
    """

    def __init__(self, values: Sequence[ValueInfo], tensors: Sequence[Tensor]) -> None:
        self._pairs = tuple(zip(values, tensors, strict=True))

    def pairs(self, role: Role) -> Iterator[tuple[ValueInfo, Tensor]]:
        """What is known of each tensor of a role, and the tensor."""
        return (pair for pair in self._pairs if pair[0].role == role)

    def single(self, role: Role) -> Tensor:
        """The only tensor of a role."""
        return next(tensor for _, tensor in self.pairs(role))

    def all(self, role: Role) -> list[Tensor]:
        """In order."""
        return [tensor for _, tensor in self.pairs(role)]

    def by_tensor(self, role: Role) -> dict[str, Tensor]:
        """By the submodel's tensor that each belongs to."""
        return {value.tensor: tensor for value, tensor in self.pairs(role)}

    def coefficient(self, name: str) -> Tensor | float:
        """A scalar of `TrainingSettings`; 0 where the step takes none of that name."""
        return next((tensor for value, tensor in self.pairs("coefficient") if value.name == name), 0.0)
