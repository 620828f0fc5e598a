"""The memory that a program is planned to take on a device, by what it is for."""

from dataclasses import dataclass, fields

from subfleet.protocol.errors import ProtocolError

__all__ = ["MemoryPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """By how much a trainer's process grows while it loads a program and trains with it, at the moment of its peak.

    Every part is counted in bytes and is 0 or more.

    Attributes:
        weights_bytes: parameters and buffers, before and after a step, and the anchors of a proximal term.
        optimiser_bytes: optimiser states and summed gradients, before and after a step.
        fed_bytes: one batch and all else that is fed with it, and what is read after a step.
        activation_bytes: most bytes of one step's own tensors that are alive at once.
        workspace_bytes: kernels' scratch memory, and what the runtime's allocator loses between blocks.
        runtime_bytes: the program, the runtime's own objects for it, and what the first step maps.

    Raises:
        ProtocolError: a part is below 0.
    """

    weights_bytes: int = 0
    optimiser_bytes: int = 0
    fed_bytes: int = 0
    activation_bytes: int = 0
    workspace_bytes: int = 0
    runtime_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            size_bytes = getattr(self, field.name)
            if size_bytes < 0:
                raise ProtocolError(f"a memory plan's {field.name} is {size_bytes}, but must be 0 or more")

    @property
    def peak_bytes(self) -> int:
        """The whole: all parts are there at once."""
        return (
            self.weights_bytes
            + self.optimiser_bytes
            + self.fed_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + self.runtime_bytes
        )
