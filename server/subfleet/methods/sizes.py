"""Spaces of sizes and ways to keep to one, that several methods share."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, largest_fitting
from subfleet.methods.describing import Published
from subfleet.methods.roles import Roles
from subfleet.methods.uniting import Unions, place_in_front
from subfleet.protocol.submodel import Architecture

__all__ = [
    "DECLARED",
    "ONE_MODEL",
    "SLICES",
    "FixedSize",
    "Homogeneous",
    "architecture_id",
    "one_model",
    "one_size",
    "whole_depth",
    "with_fixed_sizes",
]

Homogeneous = Literal["largest", "smallest", "nested"]
"""Which models are trained: "largest" the whole one, which leaves out a client that cannot carry it (exclusive
learning); "smallest" the smallest of the space, by everybody; "nested" each client's largest, as in HeteroFL."""

FixedSize = Literal["largest", "declared"]
"""What each client has in all rounds: "largest" the largest size that fits what its log has but for a fraction of the
time (`log_quantile`), and of a client that replays no log the largest that fits when it is given its first; "declared"
the architecture that it has declared, a submodel or a network of its own."""


ONE_MODEL = Published(
    value="largest",
    told={"nested": "each client trains the largest submodel that fits, instead of one model for all"},
)
"""Of `Homogeneous`, in papers that have one model for all, whichever that is."""
DECLARED = Published(value="declared", told="architectures are chosen by the log or the first budget, not declared")
"""Of `FixedSize`, in papers whose clients come with an architecture."""

SLICES = Unions(holds=lambda network, size: True, succeed=place_in_front)
"""Networks that clients bring are slices of their union."""


def one_size(model: Homogeneous, network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
    """The space of a homogeneous method."""
    if model == "largest":
        return (network.full_architecture(),)
    space = uniform_space(network, rates)
    return space if model == "nested" else space[:1]


def whole_depth(network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
    """Every width rate with all blocks, for methods that cut widths alone."""
    every = network.full_architecture().blocks
    kept = [architecture for architecture in uniform_space(network, rates) if architecture.blocks == every]
    return tuple(replace(architecture, name=architecture.name.split(" ")[0]) for architecture in kept)


def one_model(model: Homogeneous) -> Assigner:
    """The assigner of a homogeneous method."""
    return Assigner(space=partial(one_size, model))


def with_fixed_sizes(roles: Roles, choice: FixedSize, unions: Unions = SLICES) -> Roles:
    """A method's roles whose clients have one size each, chosen so; a client that it does not fit sits out.

    Args:
        roles: of the method.
        choice: of sizes.
        unions: how networks are joined that clients bring.
    """
    if choice == "declared":
        assigner = replace(roles.assigner, assign=_assign_declared, declarations=True)
        return replace(roles, assigner=assigner, networks=unions.networks())
    return replace(roles, assigner=replace(roles.assigner, assign=_keep_or_largest, lasting=True))


def architecture_id(network: Network, size: Architecture) -> str:
    """The same for clients of one architecture, whatever the network is that it is a size of."""
    told = repr(sorted(network.shapes(size).items()))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _keep_or_largest(context: AssignmentContext) -> Assignment:
    if context.previous is not None:
        return _only(context, context.previous, "the size that it keeps")
    if context.lasting is None:
        return largest_fitting(context)
    lasting = largest_fitting(replace(context, budget=context.lasting)).candidate or context.candidates[0]
    return _only(context, lasting.architecture, "the size that its log has room for")


def _assign_declared(context: AssignmentContext) -> Assignment:
    if context.declared is None:
        return Assignment(candidate=None, reason="it has declared no architecture")
    return _only(context, context.declared, "its declared architecture")


def _only(context: AssignmentContext, size: Architecture, words: str) -> Assignment:
    """This size or none: it is never cut to a smaller one."""
    candidate = context.estimate(size)
    why = context.why_not(candidate)
    if not why:
        return Assignment(candidate=candidate)
    if context.below is not None:
        why = context.too_much
    return Assignment(candidate=None, reason=f"{words}, {size.name!r}, {why}", only=candidate)
