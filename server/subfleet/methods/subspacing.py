"""The part of a supernet that a client is sent, and the paths that it may draw of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from subfleet.elastic.cost import part_costs
from subfleet.elastic.network import Network
from subfleet.methods.assigner import Assignment, AssignmentContext, stream_of
from subfleet.protocol.chains import Chain
from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.paths import PathSampler, PathSettings
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import lacking_operators
from subfleet.search.subspaces import draw_subspace
from subfleet.search.tiers import Tier, tier_for, tiers_of

__all__ = ["Subspaces", "drawn_tier", "supernet_tiers"]

_FLOAT_BYTES = 4
_SHRUNK, _MOST_DRAWS = 0.8, 12
"""By what the budget of bytes is lowered where a subspace has no room in memory, and how often one is drawn."""
_Parts = Mapping[str, tuple[int, int]]


def supernet_tiers(network: Network, count: int) -> tuple[Tier, ...]:
    """The tiers of a supernet's paths, the same in every run."""
    parts = part_costs(network)
    choices = tuple(tuple(parts[part][1] for part in choice.parts) for choice in network.choices.values())
    return tiers_of(parts[""][1], choices, count, 0)


def drawn_tier(seed: int, client_id: str, count: int) -> int:
    """A client's own tier for the whole run of a seed, from 1, all equally likely."""
    return 1 + stream_of(f"{seed}/{client_id}/tier").randrange(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subspaces:
    """How subspaces are given (FedorAS, section 3.1).

    Attributes:
        share: of the bytes of all operators that a client is sent at most, as far as its link has room.
        sampler: how the client draws paths.
        tiers: how many there are.
        drawn: whether a client's tier is drawn for it; else it is that of what it can compute.
    """

    share: float
    sampler: PathSampler
    tiers: int
    drawn: bool

    def assign(self, context: AssignmentContext, network: Network) -> Assignment:
        """A subspace for a client: its size is the whole supernet, whose program chains whatever is drawn."""
        whole = next(one for one in context.candidates if one.architecture.network == network.id)
        parts, macs = part_costs(network), self._forward_macs(context, network)
        chain = (
            context.written[whole.architecture.architecture_id].facts.chain
            if whole.architecture.architecture_id in context.written
            else None
        )
        # Of a chain that is written, the subspace is asked for what fits, but what a device cannot load it never can.
        if (chain is None or whole.architecture.architecture_id in context.refused) and (
            barred := context.barred(whole)
        ):
            return Assignment(candidate=None, reason=f"the supernet {barred}", only=whole)
        choices = _runnable(network, parts, macs, chain, context.operators)
        budget_bytes = self._budget_bytes(context, parts)
        for attempt in range(_MOST_DRAWS):
            kept = draw_subspace(choices, budget_bytes, context.draw.stream(f"subspace/{attempt}"))
            if kept is None:
                return Assignment(candidate=None, reason=_too_little(context, macs), only=whole)
            if macs is not None and _least_macs(parts, kept) > macs:
                continue
            architecture = _architecture_of(network, kept)
            if self._has_room(context, architecture, chain):
                paths = PathSettings(sampler=self.sampler, forward_macs=macs)
                return Assignment(candidate=whole, placed=architecture, paths=paths)
            budget_bytes *= _SHRUNK
        return Assignment(candidate=None, reason=_too_little(context, macs), only=whole)

    def _forward_macs(self, context: AssignmentContext, network: Network) -> int | None:
        """That of its tier, which clients of a tier share (section 3.1), or its own where that is less."""
        own, tiers = context.budget.forward_macs, supernet_tiers(network, self.tiers)
        if self.drawn:
            tier = tiers[drawn_tier(context.draw.seed, context.draw.client_id, self.tiers) - 1]
        elif own is None:
            return None
        else:
            tier = tier_for(tiers, own)
        return tier.high_macs if own is None else min(own, tier.high_macs)

    def _budget_bytes(self, context: AssignmentContext, parts: _Parts) -> float:
        """For operators: the fraction of them all, as far as link and disk have room beside what is always sent."""
        always = _FLOAT_BYTES * parts[""][0]
        operators = _FLOAT_BYTES * sum(count for count, _ in parts.values()) - always
        limits = [one for one in (context.budget.downlink_bytes, context.budget.uplink_bytes) if one is not None]
        if context.budget.disk_bytes is not None:
            program_bytes = max((one.facts.program_bytes for one in context.written.values()), default=0)
            limits.append((context.budget.disk_bytes - program_bytes) // TRAINED_COPIES)
        return min([self.share * operators, *(one - always for one in limits)])

    def _has_room(self, context: AssignmentContext, architecture: Architecture, chain: Chain | None) -> bool:
        """Whether the leanest path has room: by the program's own plan where it is known, else by shapes."""
        if chain is None:
            needed_bytes = context.estimate(architecture).training_memory_bytes.get(context.target, 0)
            return needed_bytes <= context.budget.memory_bytes
        return chain.room(chain.kept(dict(architecture.choices))).least_peak_bytes <= context.budget.memory_bytes


def _runnable(
    network: Network, parts: _Parts, macs: int | None, chain: Chain | None, operators: tuple[str, ...]
) -> dict[str, dict[str, int]]:
    """Of each choice, with their bytes, the operators that the device can run: what it lacks costs infinity."""
    known = None if chain is None else {link.name: {one.name: one for one in link.operators} for link in chain.links}
    cheapest = {name: min(parts[part][1] for part in choice.parts) for name, choice in network.choices.items()}
    others = parts[""][1] + sum(cheapest.values())
    found: dict[str, dict[str, int]] = {name: {} for name in network.choices}
    for name, choice in network.choices.items():
        for operator, part in zip(choice.operators, choice.parts, strict=True):
            if known is not None:
                told = known[name].get(operator)
                if told is None or lacking_operators(told.needs, operators):
                    continue
            if macs is None or others - cheapest[name] + parts[part][1] <= macs:
                found[name][operator] = _FLOAT_BYTES * parts[part][0]
    return found


def _architecture_of(network: Network, kept: Mapping[str, tuple[str, ...]]) -> Architecture:
    """The subspace; choices that are whole are not named."""
    named = tuple((name, own) for name, own in kept.items() if own != network.choices[name].operators)
    count = sum(map(len, kept.values()))
    return replace(network.full_architecture(), choices=named, name=f"subspace of {count}" if named else "supernet")


def _least_macs(parts: _Parts, kept: Mapping[str, tuple[str, ...]]) -> int:
    return parts[""][1] + sum(min(parts[f"{name}.{one}"][1] for one in own) for name, own in kept.items())


def _too_little(context: AssignmentContext, macs: int | None) -> str:
    most = "" if macs is None else f" and {macs} multiply-accumulates"
    return (
        f"no subspace of the supernet fits {context.budget.memory_bytes} bytes of memory, "
        f"{context.budget.downlink_bytes} bytes down, {context.budget.uplink_bytes} bytes up{most}"
    )
