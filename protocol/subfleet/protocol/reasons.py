"""Reasons to refuse a task or a declaration, as both sides know them."""

from typing import Literal

RefusalReason = Literal["memory", "runtime", "program", "data", "failed", "disk", "link", "compute", "diverged"]
"""Why a device does not do a task: it needs more "memory", "disk", "link" or "compute" than available; the "runtime"
cannot run the program; the "program" cannot be fetched or read; the "data" cannot be used; training "diverged" to a
loss or weight that is not finite; or it "failed" otherwise. The server decides what follows. A server that does not
know a reason logs and drops the refusal; its round continues without the device after the deadline."""
ArchitectureProblem = Literal[
    "unknown_axis", "unknown_block", "too_large", "not_in_space", "not_used", "no_network", "too_many"
]
"""Why a declared architecture is not trained: the run's network lacks the axis or the block, or the axis is smaller;
the submodel is not in the method's search space; the method uses no declarations, so the device is treated as any
other; the declared network is invalid; or the device has declared too many networks."""
