"""A place of a network with alternative operators, of which each pass runs one."""

from collections.abc import Mapping

from torch import Tensor, nn

from subfleet.protocol.errors import ConfigError


class ChoiceBlock(nn.Module):
    """Runs the operator that is drawn (FedorAS, section 3.1; Guo et al. 2020, "Single Path One-Shot", section 3.2).

    Its children are the operators; all map inputs of one shape to outputs of one shape.

    Args:
        operators: by name, one or more.

    Attributes:
        drawn: the name of the one that runs: the first one, until it is set.
    """

    def __init__(self, operators: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, operator in operators.items():
            self.add_module(name, operator)
        self.drawn = next(iter(operators))

    @property
    def operators(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(name for name, _ in self.named_children())

    def forward(self, x: Tensor) -> Tensor:
        """Whatever the drawn operator makes of its input."""
        result: Tensor = self.get_submodule(self.drawn)(x)
        return result


def draw(module: nn.Module, path: Mapping[str, str]) -> None:
    """Let a supernet's module run a path from now on.

    Args:
        module: of a network with choices.
        path: the operator of each choice that is to change, by the choice's name.

    Raises:
        ConfigError: the module has no such operator.
    """
    for name, operator in path.items():
        block = module.get_submodule(name)
        if not isinstance(block, ChoiceBlock) or operator not in block.operators:
            raise ConfigError(f"the module {name!r} has no operator {operator!r} to draw")
        block.drawn = operator
