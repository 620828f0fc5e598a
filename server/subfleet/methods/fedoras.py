"""FedorAS: a supernet that devices train path by path, a search in it for each tier of devices, and fine-tuning.

Dudziak et al., "FedorAS: Federated Architecture Search under system heterogeneity", section 3.

Client half: in the first stage it draws a path of its subspace for each batch, within its compute and memory when the
task begins, takes one step, and reports how many examples went through each operator (sections 3.1 and 3.2). In the
last stage it trains its tier's network, or that of a lower tier, as in federated averaging (section 3.3). Tiers take
turns: each has its own rounds, with clients of that tier and above.
Server half: it gives each client its own subspace within a budget of bytes (equation 1), averages each operator by the
examples that went through it, and leaves it unchanged if too few clients had it (OPA, equation 5). Then it searches,
tier by tier, for the path that does best on validation data (equation 6), which becomes a network of the run.

The text differs from its public code: subspaces differ between clients, operators outside of them are not sent, and
weights of operators count by their own examples. A budget may be used completely ("<=", where equation 3 has "<"), and
the least that later choices need is reserved, without which the printed draw can end where nothing fits.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from subfleet.elastic.cost import part_costs
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Aggregator, Participant
from subfleet.methods.assigner import Assignment, AssignmentContext, open_stream
from subfleet.methods.describing import MethodInfo, parameter, parameters
from subfleet.methods.roles import LocalTraining, Memory, Roles
from subfleet.methods.run_networks import Networks, StandingContext
from subfleet.methods.selector import Selection, SelectionContext, Selector, select_at_random
from subfleet.methods.sizes import assign_homogeneous
from subfleet.methods.tier_search import TierMemory, TierSearch, get_tier, list_network_tiers
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.chains import Chain
from subfleet.protocol.disk import TRAINED_COPIES
from subfleet.protocol.limits import MAX_SINGLE, Positive, PositiveFraction
from subfleet.protocol.messages import Update
from subfleet.protocol.paths import OperatorExamples, PathSampler, PathSettings
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.search.candidates import list_lacking_operators
from subfleet.search.supernets import draw_subspace, find_tier

_LAST_RATE = 0.1
"""The final learning rate of fine-tuning over the first one (the public code's schedule)."""
_FLOAT_BYTES = 4
_SHRINK, _MOST_DRAWS = 0.8, 12
"""Factor on the budget of bytes after a subspace that exceeds the memory, and how often one is drawn."""
_Parts = Mapping[str, tuple[int, int]]
"""By part of a supernet, its parameters and its multiply-accumulates; "" is what every path has."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class FedorAS:
    """Parameters of FedorAS. A run's rounds are those of the supernet, then those of fine-tuning, tiers in turn.

    Attributes:
        supernet_rounds: of the first stage, 1 or more; the search follows the last of them.
        subspace: the largest fraction of the bytes of all operators that a client gets, above 0 to 1 (equation 1).
        path_sampler: how paths are drawn on devices.
        aggregation: the weight of an operator's update: "operators", the examples that went through it; "clients", the
            client's samples, whatever it drew, as in plain averaging.
        min_contributors: clients that must have trained an operator for it to move, 1 or more; 1 in the public code.
        tiers: of devices, 1 or more.
        tiers_by: "measured" assigns tiers by what devices can compute for a sample, and the highest one to a device
            that does not report it; "drawn" draws each client's tier for the run, all equally likely, as published.
        search: how each tier is searched.
        start: the first weights of searched networks: the "supernet"'s, or "fresh" ones, for comparison.
        tuning_epochs: of each client in a round of fine-tuning, 1 or more.
        tuning_learning_rate: of a network's first round of fine-tuning, 0 or more.
        tuning_rounds: of each tier's network, in which the learning rate falls to a tenth along half a cosine, 1 or
            more; a run needs as many for each of its tiers.
    """

    TYPE: ClassVar[str] = "fedoras"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="FedorAS",
        paper="Dudziak et al., FedorAS: Federated Architecture Search under system heterogeneity, 2022",
        varies=("operator",),
        departures={
            "the best and the worst quarter of devices' scores of a path are left out": (
                lambda method, setting: method.search.scoring == "devices"
            )
        },
    )
    supernet_rounds: Positive = 500  # in the paper 500 to 750, by data set
    subspace: PositiveFraction = parameter(0.5)
    path_sampler: PathSampler = parameter("greedy", otherwise="paths are drawn uniformly from all valid ones")
    aggregation: Literal["operators", "clients"] = parameter(
        "operators", otherwise="operators are averaged by clients' samples"
    )
    min_contributors: Positive = parameter(2, otherwise={1: "an operator trained by a single client is aggregated"})
    tiers: Positive = 4  # in the paper 4 or 5, by data set
    tiers_by: Literal["measured", "drawn"] = parameter(
        "measured", paper="drawn", otherwise="tiers depend on the devices' compute"
    )
    search: TierSearch = parameters(TierSearch)
    start: Literal["supernet", "fresh"] = parameter("supernet", otherwise="searched networks start with fresh weights")
    tuning_epochs: Positive = parameter(1)
    tuning_learning_rate: Annotated[float, Range(least=0, below=MAX_SINGLE)] = parameter(0.01)
    tuning_rounds: Positive = parameter(100)

    def roles(self) -> Roles:
        """A subspace of the supernet for each client, then a network for each tier."""
        aggregator = Aggregator(
            min_contributors=lambda network: self.min_contributors if network.choices else 1, model="tier"
        )
        if self.aggregation == "operators":
            aggregator = replace(aggregator, weigh=_count_examples, factors=_weigh_operators)
        return Roles(
            networks=Networks(
                path_search=self.search.path_search(self.supernet_rounds, self.tiers, fresh=self.start == "fresh"),
                standing=self._find_standing,
            ),
            memory=Memory(initial=TierMemory()),
            selector=Selector(select=self._select),
            assigner=replace(assign_homogeneous("largest"), assign=self._assign),
            training=LocalTraining(for_round=self._tune, draws_paths=True),
            aggregator=aggregator,
        )

    def _assign(self, context: AssignmentContext) -> Assignment:
        supernet = next((network for network in context.networks.values() if network.choices), None)
        if supernet is not None:
            return self._assign_subspace(context, supernet)
        highest = self._highest_tier(context.draw.seed, context.draw.client_id)
        fitting = {
            get_tier(candidate.architecture): candidate
            for candidate in context.fitting
            if get_tier(candidate.architecture) <= highest
        }
        tier = next(iter(self._order_tiers(context.draw.round, fitting)), None)
        return Assignment(candidate=None if tier is None else fitting[tier])

    def _assign_subspace(self, context: AssignmentContext, network: Network) -> Assignment:
        """Assign a subspace; its size is the whole supernet, because one program chains any operators."""
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
        budget_bytes = _limit_bytes(self.subspace, context, parts)
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
                paths = PathSettings(sampler=self.path_sampler, forward_macs=macs)
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
        if self.tiers_by == "drawn":
            tier = tiers[draw_tier(context.draw.seed, context.draw.client_id, self.tiers) - 1]
        elif own is None:
            return None
        else:
            tier = find_tier(tiers, own)
        return tier.high_macs if own is None else min(own, tier.high_macs)

    def _select(self, context: SelectionContext) -> Selection:
        """In fine-tuning, select among the clients of the round's tier and above (section 3.3)."""
        networks = {get_tier(network.full_architecture()): network for network in context.networks.values()}
        if any(network.choices for network in networks.values()):
            return select_at_random(context)
        for tier in self._order_tiers(context.round, networks):
            macs = sum(macs for _, macs in part_costs(networks[tier]).values())
            able = [
                client
                for client in context.clients
                if (client.budget.forward_macs is None or macs <= client.budget.forward_macs)
                and tier <= self._highest_tier(context.seed, client.client_id)
            ]
            if able:
                return select_at_random(replace(context, clients=tuple(able)))
        return select_at_random(context)

    def _order_tiers(self, round_number: int, tiers: Iterable[int]) -> list[int]:
        """These tiers, with the one that the round of fine-tuning belongs to first, or the nearest to it."""
        turn = (round_number - 1 - self.supernet_rounds) % self.tiers + 1
        return sorted(tiers, key=lambda tier: (tier > turn, abs(turn - tier)))

    def _highest_tier(self, seed: int, client_id: str) -> float:
        """The highest tier from which a client may have the network, if it can train it."""
        return draw_tier(seed, client_id, self.tiers) if self.tiers_by == "drawn" else math.inf

    def _find_standing(self, context: StandingContext) -> Architecture:
        """The network of the highest tier that a client can have."""
        highest = self._highest_tier(context.seed, context.client.client_id)
        sizes = sorted((network.full_architecture() for network in context.networks.values()), key=get_tier)
        able = [size for size in sizes if get_tier(size) <= highest] or sizes[:1]
        ready = [size for size in able if context.ready(size)]
        return (ready or able[:1])[-1]

    def _tune(self, settings: TrainingSettings, round_number: int) -> TrainingSettings:
        done = round_number - 1 - self.supernet_rounds
        if done < 0:
            return settings
        angle = min(done // self.tiers / self.tuning_rounds, 1.0) * math.pi
        factor = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(angle)) / 2
        return replace(
            settings, epochs=self.tuning_epochs, local_steps=0, learning_rate=self.tuning_learning_rate * factor
        )


def _sum_examples(examples: OperatorExamples) -> int:
    """How many examples a client trained on: all went through one operator of each choice."""
    return max((sum(count for _, count in counts) for _, counts in examples), default=0)


def _count_examples(update: Update) -> float:
    return float(_sum_examples(update.operator_examples) or update.sample_count)


def _weigh_operators(network: Network, client: Participant) -> Mapping[str, float]:
    """Weigh each operator's tensors by its fraction of the client's examples (OPA, equation 5)."""
    total = _sum_examples(client.examples)
    if not total or not network.choices:
        return {}
    fractions = {
        f"{choice}.{operator}": count / total for choice, counts in client.examples for operator, count in counts
    }
    parts = network.parts_of(client.architecture)
    return {
        name: fractions.get(decl.part, 0.0)
        for name, decl in network.tensors.items()
        if decl.part is not None and decl.part in parts
    }


def draw_tier(seed: int, client_id: str, count: int) -> int:
    """A client's tier for the whole run, from 1, all equally likely."""
    return 1 + open_stream(f"{seed}/{client_id}/tier").randrange(count)


def _limit_bytes(fraction: float, context: AssignmentContext, parts: _Parts) -> float:
    """The budget for operators: the fraction of them all, if link and disk have room for it beside the rest."""
    always = _FLOAT_BYTES * parts[""][0]
    operators = _FLOAT_BYTES * sum(count for count, _ in parts.values()) - always
    limits = [limit for limit in (context.budget.downlink_bytes, context.budget.uplink_bytes) if limit is not None]
    if context.budget.disk_bytes is not None:
        program_bytes = max((written.facts.program_bytes for written in context.written.values()), default=0)
        limits.append((context.budget.disk_bytes - program_bytes) // TRAINED_COPIES)
    return min([fraction * operators, *(limit - always for limit in limits)])


def _fits_memory(context: AssignmentContext, architecture: Architecture, chain: Chain | None) -> bool:
    """Whether the leanest path fits: by the program's own plan if it is known, else by shapes."""
    if chain is None:
        peak_bytes = context.estimate(architecture).training_memory_bytes.get(context.target, 0)
    else:
        peak_bytes = chain.plan_memory(chain.restrict(dict(architecture.choices))).least_peak_bytes
    return peak_bytes <= context.budget.memory_bytes


def _list_runnable(
    network: Network, parts: _Parts, macs: int | None, chain: Chain | None, operators: tuple[str, ...]
) -> dict[str, dict[str, int]]:
    """The bytes of the operators of each choice that the device can run."""
    needs = {(link.name, own.name): own.needs for link in chain.links for own in link.operators} if chain else {}
    cheapest = {name: min(parts[part][1] for part in choice.parts) for name, choice in network.choices.items()}
    least = parts[""][1] + sum(cheapest.values())
    runnable: dict[str, dict[str, int]] = {name: {} for name in network.choices}
    for name, choice in network.choices.items():
        for operator, part in zip(choice.operators, choice.parts, strict=True):
            needed = () if chain is None else needs.get((name, operator))
            able = needed is not None and not list_lacking_operators(needed, operators)
            if able and (macs is None or least - cheapest[name] + parts[part][1] <= macs):
                runnable[name][operator] = _FLOAT_BYTES * parts[part][0]
    return runnable


def _build_architecture(network: Network, kept: Mapping[str, tuple[str, ...]]) -> Architecture:
    """The subspace; choices with all operators are not listed."""
    choices = tuple((name, own) for name, own in kept.items() if own != network.choices[name].operators)
    name = f"subspace of {sum(map(len, kept.values()))}" if choices else "supernet"
    return replace(network.full_architecture(), choices=choices, name=name)
