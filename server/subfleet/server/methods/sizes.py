"""Spaces of sizes and ways to keep to one, that several methods share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from subfleet.elastic.network import Network
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.methods.policies import Ask, Assigned, largest_fitting

__all__ = ["Homogeneous", "keep_or_largest", "one_size", "whole_depth"]

Homogeneous = Literal["largest", "smallest", "nested"]
"""Which models are trained: "largest" the whole one, which leaves out a client that cannot carry it (exclusive
learning); "smallest" the smallest of the space, by everybody; "nested" each client's largest, as in HeteroFL."""


def one_size(model: Homogeneous, network: Network, rates: Sequence[float]) -> tuple[SubnetSpec, ...]:
    """The space of a homogeneous method."""
    if model == "largest":
        return (network.full_spec(),)
    space = uniform_space(network, rates)
    return space if model == "nested" else space[:1]


def whole_depth(network: Network, rates: Sequence[float]) -> tuple[SubnetSpec, ...]:
    """Every width rate with all blocks, for methods that cut widths alone."""
    every = network.full_spec().blocks
    kept = [spec for spec in uniform_space(network, rates) if spec.blocks == every]
    return tuple(replace(spec, name=spec.name.split(" ")[0]) for spec in kept)


def keep_or_largest(ask: Ask) -> Assigned:
    """The largest that fits at first, and the same ever after: a client whose budget sinks below it sits out."""
    if ask.previous is None:
        return largest_fitting(ask)
    kept = ask.price(ask.previous)
    return Assigned(candidate=kept if ask.allows(kept) else None)
