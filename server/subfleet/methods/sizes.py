"""Spaces of sizes, and ways to place and to keep a size, that several methods share."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from subfleet.elastic.axes import Axis
from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, assign_largest
from subfleet.methods.roles import Roles
from subfleet.methods.uniting import Unions, place_in_front
from subfleet.protocol.submodel import Architecture, Explicit, IndexSet, Prefix

Homogeneous = Literal["largest", "smallest", "nested"]
"""Which models are trained: "largest", the whole one, so that a client that cannot carry it sits out (exclusive
learning); "smallest", the smallest of the space, by every client; "nested", each client's largest, as in HeteroFL."""

FixedSize = Literal["largest", "declared"]
"""The size that a client keeps in all rounds: "largest", the largest that fits what its log has most of the time
(`log_quantile`), or without a log the largest that fits first; "declared", the architecture that it declares, a
submodel or a network of its own."""

NESTED = MappingProxyType({"nested": "each client trains the largest submodel that fits, instead of one model for all"})
"""The departure from papers with one model for all clients, whichever model that is."""
UNDECLARED = "architectures are chosen by the log or the first budget, not declared"
"""The departure from papers in which clients come with an architecture."""

SLICES = Unions(holds=lambda network, size: True, succeed=place_in_front)
"""Clients' own networks are slices of their union."""


def list_widths(network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
    """The submodels of every width rate with all blocks, for methods that vary widths alone."""
    blocks = network.full_architecture().blocks
    whole = [architecture for architecture in uniform_space(network, rates) if architecture.blocks == blocks]
    return tuple(replace(architecture, name=architecture.name.split(" ")[0]) for architecture in whole)


def place_axes(network: Network, size: Architecture, choose: Callable[[Axis, Prefix], IndexSet]) -> Architecture:
    """The size with the indices of every narrowed axis chosen anew, as many as before."""
    axes = ((name, choose(network.axes[name], kept) if isinstance(kept, Prefix) else kept) for name, kept in size.axes)
    return replace(size, axes=tuple(axes))


def keep_groups(axis: Axis, groups: Collection[int]) -> Explicit:
    """The indices of some of an axis's groups, which it keeps or leaves out as a whole."""
    step = axis.granularity
    return Explicit(indices=tuple(group * step + offset for group in sorted(groups) for offset in range(step)))


def assign_homogeneous(model: Homogeneous) -> Assigner:
    """The assigner of a method with one model for all clients."""

    def list_sizes(network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
        if model == "largest":
            return (network.full_architecture(),)
        space = uniform_space(network, rates)
        return space if model == "nested" else space[:1]

    return Assigner(space=list_sizes)


def with_fixed_sizes(roles: Roles, choice: FixedSize, unions: Unions = SLICES) -> Roles:
    """A method's roles with one size for each client; a client that it does not fit sits out.

    Args:
        roles: of the method.
        choice: how sizes are chosen.
        unions: how clients' own networks are joined.
    """
    if choice == "declared":
        assigner = replace(roles.assigner, assign=_assign_declared, declarations=True)
        return replace(roles, assigner=assigner, networks=unions.networks())
    return replace(roles, assigner=replace(roles.assigner, assign=_keep_or_assign_largest, lasting=True))


def hash_architecture(network: Network, size: Architecture) -> str:
    """An id that is equal for clients of the same architecture, whichever network their sizes belong to."""
    shapes = repr(sorted(network.shapes(size).items()))
    return hashlib.sha256(shapes.encode()).hexdigest()[:16]


def _keep_or_assign_largest(context: AssignmentContext) -> Assignment:
    if context.previous is not None:
        return _assign_only(context, context.previous, "the size that it keeps")
    if context.lasting is None:
        return assign_largest(context)
    lasting = assign_largest(replace(context, budget=context.lasting)).candidate or context.candidates[0]
    return _assign_only(context, lasting.architecture, "the size that fits its log")


def _assign_declared(context: AssignmentContext) -> Assignment:
    if context.declared is None:
        return Assignment(candidate=None, reason="it has declared no architecture")
    return _assign_only(context, context.declared, "its declared architecture")


def _assign_only(context: AssignmentContext, size: Architecture, words: str) -> Assignment:
    """Assign this size or none, never a smaller one."""
    candidate = context.estimate(size)
    why = context.why_not(candidate)
    if not why:
        return Assignment(candidate=candidate)
    if context.below is not None:
        why = context.below_reason
    return Assignment(candidate=None, reason=f"{words}, {size.name!r}, {why}", only=candidate)
