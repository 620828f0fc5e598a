"""A block with alternative operators; each forward pass runs one of them."""

from collections.abc import Mapping

from torch import Tensor, nn

from subfleet.protocol.errors import ConfigError


class ChoiceBlock(nn.Module):
    """Runs the drawn operator (FedorAS, section 3.1; Guo et al. 2020, "Single Path One-Shot", section 3.2).

    Its children are the operators, which have the same input and output shapes.

    Args:
        operators: operators by name, at least one.

    Attributes:
        drawn: name of the operator that runs; initially the first.
    """

    def __init__(self, operators: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, operator in operators.items():
            self.add_module(name, operator)
        self.drawn = next(iter(operators))

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators in order."""
        return tuple(name for name, _ in self.named_children())

    def forward(self, x: Tensor) -> Tensor:
        """Run the drawn operator."""
        result: Tensor = self.get_submodule(self.drawn)(x)
        return result


def draw(module: nn.Module, path: Mapping[str, str]) -> None:
    """Set the path that a supernet's module runs.

    Args:
        module: module of a network with choices.
        path: operator by the name of its choice; other choices stay unchanged.

    Raises:
        ConfigError: the module has no such operator.
    """
    for name, operator in path.items():
        block = module.get_submodule(name)
        if not isinstance(block, ChoiceBlock) or operator not in block.operators:
            raise ConfigError(f"the module {name!r} has no operator {operator!r} to draw")
        block.drawn = operator
