"""The part of a supernet that a client gets, and the paths that it may draw from it (FedorAS, section 3.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from subfleet.elastic.cost import part_costs
from subfleet.elastic.network import Network
from subfleet.methods.assigner import Assignment, AssignmentContext, open_stream
from subfleet.protocol.chains import Chain
from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.paths import PathSampler, PathSettings
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import list_lacking_operators
from subfleet.search.supernets import Tier, draw_subspace, find_tier, list_tiers

_FLOAT_BYTES = 4
_SHRINK, _MOST_DRAWS = 0.8, 12
"""Factor on the budget of bytes after a subspace that exceeds the memory, and how often one is drawn."""
_Parts = Mapping[str, tuple[int, int]]


def list_network_tiers(network: Network, count: int) -> tuple[Tier, ...]:
    """The tiers of a supernet's paths, the same in every run."""
    parts = part_costs(network)
    choices = tuple(tuple(parts[part][1] for part in choice.parts) for choice in network.choices.values())
    return list_tiers(parts[""][1], choices, count, 0)


def draw_tier(seed: int, client_id: str, count: int) -> int:
    """A client's tier for the whole run, from 1, all equally likely."""
    return 1 + open_stream(f"{seed}/{client_id}/tier").randrange(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subspaces:
    """How clients get subspaces.

    Attributes:
        share: the largest fraction of the bytes of all operators that a client gets, if its link allows it.
        sampler: how the client draws paths.
        tiers: how many there are.
        drawn: whether a client's tier is drawn; else it follows from what the client can compute.
    """

    share: float
    sampler: PathSampler
    tiers: int
    drawn: bool

    def assign(self, context: AssignmentContext, network: Network) -> Assignment:
        """Assign a subspace; its size is the whole supernet, whose program chains any operators."""
        whole = next(candidate for candidate in context.candidates if candidate.architecture.network == network.id)
        parts, macs = part_costs(network), self._limit_macs(context, network)
        written = context.written.get(whole.architecture.architecture_id)
        chain = None if written is None else written.facts.chain
        # A written chain is checked for each subspace below; but a device that refused the program cannot load it.
        if (chain is None or whole.architecture.architecture_id in context.refused) and (
            why := context.why_never(whole)
        ):
            return Assignment(candidate=None, reason=f"the supernet {why}", only=whole)
        choices = _list_runnable(network, parts, macs, chain, context.operators)
        budget_bytes = self._limit_bytes(context, parts)
        for attempt in range(_MOST_DRAWS):
            kept = draw_subspace(choices, budget_bytes, context.draw.stream(f"subspace/{attempt}"))
            if kept is None:
                break
            least_macs = parts[""][1] + sum(
                min(parts[f"{name}.{operator}"][1] for operator in operators) for name, operators in kept.items()
            )
            if macs is not None and least_macs > macs:
                continue
            architecture = _build_architecture(network, kept)
            if _fits_memory(context, architecture, chain):
                paths = PathSettings(sampler=self.sampler, forward_macs=macs)
                return Assignment(candidate=whole, placed=architecture, paths=paths)
            budget_bytes *= _SHRINK
        budget = context.budget
        most = "" if macs is None else f" and {macs} multiply-accumulates"
        reason = (
            f"no subspace of the supernet fits {budget.memory_bytes} bytes of memory, {budget.downlink_bytes} bytes "
            f"down, {budget.uplink_bytes} bytes up{most}"
        )
        return Assignment(candidate=None, reason=reason, only=whole)

    def _limit_macs(self, context: AssignmentContext, network: Network) -> int | None:
        """The budget of the client's tier, or its own if that is less."""
        own, tiers = context.budget.forward_macs, list_network_tiers(network, self.tiers)
        if self.drawn:
            tier = tiers[draw_tier(context.draw.seed, context.draw.client_id, self.tiers) - 1]
        elif own is None:
            return None
        else:
            tier = find_tier(tiers, own)
        return tier.high_macs if own is None else min(own, tier.high_macs)

    def _limit_bytes(self, context: AssignmentContext, parts: _Parts) -> float:
        """The budget for operators: the fraction of them all, if link and disk have room for it beside the rest."""
        always = _FLOAT_BYTES * parts[""][0]
        operators = _FLOAT_BYTES * sum(count for count, _ in parts.values()) - always
        limits = [limit for limit in (context.budget.downlink_bytes, context.budget.uplink_bytes) if limit is not None]
        if context.budget.disk_bytes is not None:
            program_bytes = max((written.facts.program_bytes for written in context.written.values()), default=0)
            limits.append((context.budget.disk_bytes - program_bytes) // TRAINED_COPIES)
        return min([self.share * operators, *(limit - always for limit in limits)])


def _fits_memory(context: AssignmentContext, architecture: Architecture, chain: Chain | None) -> bool:
    """Whether the leanest path fits: by the program's own plan if it is known, else by shapes."""
    if chain is None:
        peak_bytes = context.estimate(architecture).training_memory_bytes.get(context.target, 0)
    else:
        peak_bytes = chain.room(chain.kept(dict(architecture.choices))).least_peak_bytes
    return peak_bytes <= context.budget.memory_bytes


def _list_runnable(
    network: Network, parts: _Parts, macs: int | None, chain: Chain | None, operators: tuple[str, ...]
) -> dict[str, dict[str, int]]:
    """The bytes of the operators of each choice that the device can run."""
    links = None if chain is None else {link.name: {one.name: one for one in link.operators} for link in chain.links}
    cheapest = {name: min(parts[part][1] for part in choice.parts) for name, choice in network.choices.items()}
    least = parts[""][1] + sum(cheapest.values())
    runnable: dict[str, dict[str, int]] = {name: {} for name in network.choices}
    for name, choice in network.choices.items():
        for operator, part in zip(choice.operators, choice.parts, strict=True):
            if links is not None:
                link = links[name].get(operator)
                if link is None or list_lacking_operators(link.needs, operators):
                    continue
            if macs is None or least - cheapest[name] + parts[part][1] <= macs:
                runnable[name][operator] = _FLOAT_BYTES * parts[part][0]
    return runnable


def _build_architecture(network: Network, kept: Mapping[str, tuple[str, ...]]) -> Architecture:
    """The subspace; choices with all operators are not listed."""
    choices = tuple((name, own) for name, own in kept.items() if own != network.choices[name].operators)
    name = f"subspace of {sum(map(len, kept.values()))}" if choices else "supernet"
    return replace(network.full_architecture(), choices=choices, name=name)
