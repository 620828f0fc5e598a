"""What fits a budget: written once, for a submodel and for columns of them."""

from typing import Literal, Protocol, TypeVar, get_args

from subfleet.protocol.readings import Budget

__all__ = ["INFINITE_BYTES", "LIMITS", "Limit", "Taken", "compared"]

INFINITE_BYTES = 2**62
"""The memory of a submodel on a runtime that cannot train it: more than any budget."""

Limit = Literal["memory", "disk", "link", "compute", "runtime", "program"]
"""What keeps a size from a client: a part of its budget, a runtime that cannot run the size's program, or a program
that cannot be had or read."""
LIMITS: tuple[Limit, ...] = get_args(Limit)

T_co = TypeVar("T_co", covariant=True)


class Taken(Protocol[T_co]):
    """What training takes of a budget: numbers of one submodel, or columns with a row for each of many."""

    @property
    def memory_bytes(self) -> T_co:
        """Of the device process while it trains."""
        ...

    @property
    def disk_bytes(self) -> T_co:
        """Of the device's disk while it trains; what its program takes comes on top, where that is known."""
        ...

    @property
    def weight_bytes(self) -> T_co:
        """That travel to a device; the program is not counted, as it moves once for many rounds."""
        ...

    @property
    def update_bytes(self) -> T_co:
        """That travel back."""
        ...

    @property
    def forward_macs(self) -> T_co:
        """Multiply-accumulates of one sample's forward pass."""
        ...


def compared(taken: Taken[T_co], limits: Budget) -> tuple[tuple[Limit, T_co, int], ...]:
    """For each part of a budget that is limited: its name, what is taken of it, and the most that fits."""
    parts: tuple[tuple[Limit, T_co, int | None], ...] = (
        ("memory", taken.memory_bytes, min(limits.memory_bytes, INFINITE_BYTES - 1)),
        ("disk", taken.disk_bytes, limits.disk_bytes),
        ("link", taken.weight_bytes, limits.downlink_bytes),
        ("link", taken.update_bytes, limits.uplink_bytes),
        ("compute", taken.forward_macs, limits.forward_macs),
    )
    return tuple((limit, amount, most) for limit, amount, most in parts if most is not None)
