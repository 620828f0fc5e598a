"""Parts of networks: blocks, cells, choices of operators, and products of computed values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the network that a submodel can leave out.

    Attributes:
        name: unique in its network; prefix of the names of its tensors.
        section: index of its section.
        reads: axis of its input if its output has another one; empty if both are the same.
        gives: axis of its output, likewise. A submodel without the block passes its input on, so it keeps the same
            indices of both axes.
    """

    name: str
    section: int
    reads: str = ""
    gives: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A block as a part that a network can grow by (FedTrans, Zhu et al. 2024, section 4.1).

    Attributes:
        name: name of its block and prefix of its tensors.
        section: index of its section.
        axes: axes that become longer when it is widened: those inside the block, or the outputs of a layer of a chain.
    """

    name: str
    section: int
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChoice:
    """Alternative operators at one position of the network; a path has one of them (FedorAS, section 3.1).

    Attributes:
        name: unique in its network; the path of its module.
        operators: names of the operators, at least two, in the family's order.
    """

    name: str
    operators: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the operators as parts of the network: the paths of their modules."""
        return tuple(f"{self.name}.{operator}" for operator in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """A product of computed values, such as queries and keys, that follows from no tensor's shape.

    Attributes:
        result: sizes of the result for one sample: names of axes, and sizes that are never cut.
        summed: sizes of the summed dimensions, likewise.
        part: the skippable block or operator that computes it; None if it is always computed.
    """

    result: tuple[str | int, ...]
    summed: tuple[str | int, ...]
    part: str | None
