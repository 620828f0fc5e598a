"""The search for the best path of each tier of devices, one tier after the other (FedorAS, section 3.2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from subfleet.elastic.cost import part_costs
from subfleet.elastic.lineage import Chosen, Drawn, Lineage
from subfleet.elastic.network import Network
from subfleet.elastic.supernets import path_architecture, specialise_family
from subfleet.methods.describing import Published, parameters
from subfleet.methods.run_networks import FederatedScoring, Generation, PathSearch
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive
from subfleet.protocol.submodel import Architecture
from subfleet.search.supernets import EvolutionSettings, Tier, find_best, list_tiers, propose_paths

Scores = tuple[tuple[str, float], ...]
_SEPARATOR = " "
"""Between the operators of a path as one text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMemory:
    """The memory of FedorAS.

    Attributes:
        generations: how many have been scored.
        scores: of each tier, in order, its scored paths with their scores, in the order of scoring; a path is the names
            of its operators.
    """

    generations: int = 0
    scores: tuple[Scores, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class TierSearch:
    """How tiers are searched.

    Attributes:
        evolution: of each tier.
        scoring: "server" scores on its validation samples, "devices" on their held-out data.
        scoring_clients: devices in each round of scoring, 1 or more.
        scoring_rounds: of each generation, 1 or more; four gave the paper's ranks (section 4.7).
    """

    evolution: EvolutionSettings = parameters(
        EvolutionSettings,
        objectives=Published(
            value="accuracy_macs",
            otherwise="the search maximises accuracy alone; the paper's NSGA-II also minimises size",
        ),
    )
    scoring: Literal["server", "devices"] = "server"  # the paper has both
    scoring_clients: Positive = 10
    scoring_rounds: Positive = 4

    def path_search(self, supernet_rounds: int, tiers: int, *, fresh: bool) -> PathSearch:
        """The search as a role of the method.

        Args:
            supernet_rounds: the search follows this round.
            tiers: how many there are.
            fresh: whether the networks begin with fresh weights instead of the supernet's.
        """
        federated = FederatedScoring(clients=self.scoring_clients, rounds=self.scoring_rounds)
        return PathSearch(
            is_due=lambda memory, aggregated_round: aggregated_round == supernet_rounds,
            propose=partial(self._propose, tiers),
            record=_record,
            skip=_skip,
            conclude=partial(_conclude, fresh),
            federated=federated if self.scoring == "devices" else None,
        )

    def _propose(self, tiers: int, memory: TierMemory, network: Network, seed: int) -> Generation | None:
        choices = [choice.operators for choice in network.choices.values()]
        count_macs = _build_counter(network)
        for tier in list_network_tiers(network, tiers)[max(len(memory.scores) - 1, 0) :]:
            scored = _parse(memory.scores[tier.number - 1]) if len(memory.scores) >= tier.number else []
            paths = propose_paths(self.evolution, choices, count_macs, tier, scored, seed=seed + tier.number)
            if paths:
                least = min(map(count_macs, paths))
                return Generation(number=memory.generations + 1, tier=tier.number, paths=paths, least_macs=least)
        return None


def list_network_tiers(network: Network, count: int) -> tuple[Tier, ...]:
    """The tiers of a supernet's paths, the same in every run."""
    parts = part_costs(network)
    choices = tuple(tuple(parts[part][1] for part in choice.parts) for choice in network.choices.values())
    return list_tiers(parts[""][1], choices, count, 0)


def get_tier(size: Architecture) -> int:
    """The tier of the network that a size belongs to, from 1; 0 before the search."""
    return int(size.network.removeprefix("t") or 0)


def _record(memory: TierMemory, generation: Generation, scores: Sequence[float]) -> TierMemory:
    """Add the scores of a generation; tiers before its own have nothing left to propose."""
    known = [*memory.scores, *[()] * (generation.tier - len(memory.scores))]
    new = zip(map(_SEPARATOR.join, generation.paths), scores, strict=True)
    known[generation.tier - 1] = (*known[generation.tier - 1], *new)
    return replace(memory, generations=generation.number, scores=tuple(known))


def _skip(memory: TierMemory, generation: Generation) -> TierMemory:
    """Begin the next tier."""
    return replace(memory, scores=(*memory.scores, *[()] * (generation.tier + 1 - len(memory.scores))))


def _conclude(fresh: bool, memory: TierMemory, network: Network, aggregated_round: int) -> tuple[Lineage, ...]:
    """The best path of each tier with scores, as a network of its own."""
    count_macs, lineages = _build_counter(network), list[Lineage]()
    for number, scores in enumerate(memory.scores, start=1):
        if not scores:
            continue
        path, score = find_best(_parse(scores), count_macs)
        lineages.append(
            Lineage(
                id=f"t{number}",
                config=specialise_family(network, path_architecture(network, path)),
                parent=network.id,
                map=Drawn() if fresh else Chosen(),
                born_round=aggregated_round,
                reason=f"the best of {len(scores)} paths for tier {number}: {count_macs(path)} MACs, score {score:.4f}",
            )
        )
    return tuple(lineages)


def _parse(scores: Scores) -> list[tuple[tuple[str, ...], float]]:
    return [(tuple(path.split(_SEPARATOR)), score) for path, score in scores]


def _build_counter(network: Network) -> Callable[[Sequence[str]], int]:
    """A function from a path of a supernet to the multiply-accumulates of one sample's forward pass."""
    parts = part_costs(network)
    macs = [
        {operator: parts[part][1] for operator, part in zip(choice.operators, choice.parts, strict=True)}
        for choice in network.choices.values()
    ]
    return lambda path: parts[""][1] + sum(costs[operator] for costs, operator in zip(macs, path, strict=True))
