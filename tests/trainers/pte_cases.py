"""Small ExecuTorch programs for tests of the runtimes.

The exporter is imported where a program is written: it takes seconds, and collecting tests does not need it.
"""

import torch

BIG = 4_000_000


class Types(torch.nn.Module):
    """Maps float32 (2, 3), int64 (3,) and bool (3,) to a result of each type, and returns the float32 input."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, y + 1, torch.logical_not(z), x


class Big(torch.nn.Module):
    """The sum of BIG copies of a scalar, which are in the planned memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sum(x.repeat(BIG) + 1)


class Division(torch.nn.Module):
    """Divides integers, rounding down; the kernel refuses to divide by zero."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.div(x, y, rounding_mode="floor")


def write(module: torch.nn.Module, arguments: tuple[torch.Tensor | int, ...], *, planned: bool) -> bytes:
    """Export a module; `planned` puts its inputs and outputs into the planned memory."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass

    edge = to_edge(torch.export.export(module, arguments), compile_config=EdgeCompileConfig(_check_ir_validity=False))
    memory = MemoryPlanningPass(alloc_graph_input=planned, alloc_graph_output=planned)
    return bytes(edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=memory)).buffer)


class Scale(torch.nn.Module):
    """Multiplies a (2, 3) input by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def scattered() -> bytes:
    """A program with its constants in a separate file (.ptd), to which it has no path."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge

    module = torch.export.export(Scale(), (torch.ones(2, 3),))
    edge = to_edge(module, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    return bytes(edge.to_executorch(ExecutorchBackendConfig(external_constants=True)).buffer)


class Times(torch.nn.Module):
    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number


def with_number() -> bytes:
    """A program with an input that is not a tensor."""
    return write(Times(), (torch.ones(3), 2), planned=False)


def types(*, planned: bool) -> bytes:
    arguments = (torch.ones(2, 3), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
    return write(Types(), arguments, planned=planned)


def big() -> bytes:
    return write(Big(), (torch.ones(1),), planned=False)


def division() -> bytes:
    number = torch.ones(3, dtype=torch.int64)
    return write(Division(), (number, number), planned=False)
