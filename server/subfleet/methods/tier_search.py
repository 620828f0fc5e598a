"""The search for the best path of each tier of devices, one tier after the other (FedorAS, section 3.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from subfleet.elastic.cost import part_costs
from subfleet.elastic.lineage import Chosen, Drawn, Lineage
from subfleet.elastic.network import Network
from subfleet.elastic.supernets import path_architecture, specialise_family
from subfleet.methods.path_search import FederatedScoring, Generation, PathSearch, ProposalContext, ScoredGeneration
from subfleet.methods.subspacing import supernet_tiers
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Positive
from subfleet.protocol.submodel import Architecture
from subfleet.search.path_evolution import EvolutionSettings, best, next_population
from subfleet.search.tiers import Tier

__all__ = ["TierMemory", "TierSearch", "tier_of"]

Told = tuple[tuple[str, float], ...]
_BETWEEN = " "
"""Operators, where a path is one text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMemory:
    """What FedorAS remembers of its search.

    Attributes:
        generations: that have been scored.
        told: of each tier by its number from 1, the paths that have been scored, in the order in which they were: the
            names of their operators, and the score.
    """

    generations: int = 0
    told: tuple[Told, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class TierSearch:
    """How tiers are searched.

    Attributes:
        evolution: of each tier.
        scoring: "server" scores on its validation samples, "devices" on their held-out data.
        scoring_clients: devices in each round of scoring, 1 or more.
        scoring_rounds: of each generation, 1 or more; four gave the paper's ranks (section 4.7).
        tiers: how many; the method says it.
    """

    evolution: EvolutionSettings = field(default_factory=EvolutionSettings)
    scoring: Literal["server", "devices"] = "server"
    scoring_clients: Positive = 10
    scoring_rounds: Positive = 4
    tiers: int = 4

    def path_search(self, supernet_rounds: int, *, fresh: bool) -> PathSearch:
        """What the run is told of it.

        Args:
            supernet_rounds: after which it is due.
            fresh: whether networks that are found begin with first weights of their own.
        """
        federated = FederatedScoring(clients=self.scoring_clients, rounds=self.scoring_rounds)
        return PathSearch(
            is_due=lambda memory, aggregated_round: aggregated_round == supernet_rounds,
            propose=self._propose,
            record=_record,
            skip=_skip,
            conclude=partial(self._conclude, fresh),
            federated=federated if self.scoring == "devices" else None,
        )

    def _propose(self, context: ProposalContext) -> Generation | None:
        memory: TierMemory = context.memory
        space = _Space.of(context.network)
        for tier in supernet_tiers(context.network, self.tiers)[max(len(memory.told) - 1, 0) :]:
            told = memory.told[tier.number - 1] if len(memory.told) >= tier.number else ()
            paths = self._population(space, tier, told, context.seed)
            if paths:
                return Generation(
                    number=memory.generations + 1,
                    tier=tier.number,
                    paths=paths,
                    least_macs=min(map(space.macs_of, paths)),
                )
        return None

    def _population(self, space: "_Space", tier: Tier, told: Told, seed: int) -> tuple[tuple[str, ...], ...]:
        return next_population(self.evolution, space.choices, space.macs_of, tier, _read(told), seed=seed + tier.number)

    def _conclude(
        self, fresh: bool, memory: TierMemory, network: Network, aggregated_round: int
    ) -> tuple[Lineage, ...]:
        """The best path of each tier in which any was scored, as networks of their own."""
        space, found = _Space.of(network), list[Lineage]()
        for number, told in enumerate(memory.told, start=1):
            if not told:
                continue
            path, score = best(_read(told), space.macs_of)
            reason = f"the best of {len(told)} paths for tier {number}: {space.macs_of(path)} MACs, score {score:.4f}"
            found.append(
                Lineage(
                    id=f"t{number}",
                    config=specialise_family(network, path_architecture(network, path)),
                    parent=network.id,
                    map=Drawn() if fresh else Chosen(),
                    born_round=aggregated_round,
                    reason=reason,
                )
            )
        return tuple(found)


def tier_of(size: Architecture) -> int:
    """The tier whose network a size is of, from 1."""
    return int(size.network.removeprefix("t") or 0)


def _record(memory: TierMemory, scored: ScoredGeneration) -> TierMemory:
    """With the scores of a generation; tiers that it has gone beyond had nothing left to propose."""
    generation = scored.generation
    told = [*memory.told, *[()] * (generation.tier - len(memory.told))]
    new = zip(map(_BETWEEN.join, generation.paths), scored.scores, strict=True)
    told[generation.tier - 1] = (*told[generation.tier - 1], *new)
    return replace(memory, generations=generation.number, told=tuple(told))


def _skip(memory: TierMemory, generation: Generation) -> TierMemory:
    """With the next tier begun."""
    return replace(memory, told=(*memory.told, *[()] * (generation.tier + 1 - len(memory.told))))


def _read(told: Told) -> list[tuple[tuple[str, ...], float]]:
    return [(tuple(path.split(_BETWEEN)), score) for path, score in told]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Space:
    """The paths of a supernet, and what they take."""

    choices: tuple[tuple[str, ...], ...]
    fixed_macs: int
    macs: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, network: Network) -> "_Space":
        parts = part_costs(network)
        return cls(
            choices=tuple(choice.operators for choice in network.choices.values()),
            fixed_macs=parts[""][1],
            macs=tuple(
                {one: parts[part][1] for one, part in zip(choice.operators, choice.parts, strict=True)}
                for choice in network.choices.values()
            ),
        )

    def macs_of(self, path: Sequence[str]) -> int:
        """Multiplications of one sample's forward pass."""
        return self.fixed_macs + sum(own[one] for own, one in zip(self.macs, path, strict=True))
