"""Reasons to refuse a task or a declaration, as both sides know them."""

from typing import Literal

RefusalReason = Literal["memory", "runtime", "program", "data", "failed", "disk", "link", "compute", "diverged"]
"""Why a task is not done: it needs more "memory", "disk", "link" or "compute" than there is; the "runtime" cannot run
its program; the "program" cannot be had or read; the "data" cannot be used; training "diverged", so that a loss or a
weight is no number; or it "failed" in another way. What follows is the server's to say. A server of before one of these
words drops such a refusal with a line in its log, and its round goes on without the device at its deadline."""
ArchitectureProblem = Literal[
    "unknown_axis", "unknown_block", "too_large", "not_in_space", "not_used", "no_network", "too_many"
]
"""What keeps a declared architecture from being trained: the run's network has no such axis, or no such block, or an
axis of it is not as large; the submodel is none of the sizes that the method gives; the method goes by no declaration,
and the device takes part as any other; or what it says of a network of its own describes none that can take
part; or it has declared too many of its own by now."""
