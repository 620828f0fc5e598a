"""What training changes of a module: all of it, all but frozen parts, or adapters beside its layers."""

from dataclasses import dataclass

from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LoraSettings:
    """Adapters of low rank (Hu et al. 2022, "LoRA", section 4.1).

    Attributes:
        rank: of each adapter's product, an axis that submodels cut like others.
        targets: patterns of the linear layers that get one.
        train: patterns of layers that are trained themselves, such as a new head.
    """

    rank: Positive = 8
    targets: tuple[str, ...] = ("*",)
    train: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What training changes.

    Attributes:
        freeze: patterns of layers or parameters that it leaves as they are.
        lora: adapters, which it changes in place of everything else; None changes the module itself.
    """

    freeze: tuple[str, ...] = ()
    lora: LoraSettings | None = None


EVERYTHING_TRAINED = Tuning()
"""The module itself, all of it."""
