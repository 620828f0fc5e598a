"""Networks that appear and retire between rounds: what a method is asked after a fold, and what it answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.network import Network
from subfleet.methods.asking import stream_of

if TYPE_CHECKING:  # methods are read where no PyTorch is
    from torch import Tensor

    from subfleet.elastic.model_state import ModelState
    from subfleet.methods.policies import Participant, Trained

__all__ = ["Evolved", "Evolving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolving:
    """A folded round, after which networks may appear or retire.

    Attributes:
        round: its number.
        seed: of the run.
        lineages: of all networks that the run has had, in the order in which they appeared.
        networks: by id, those that the round was played with.
        before: the model that the round started from.
        after: the model with all updates folded in, each in its network.
        clients: whose updates were folded.
        trained: gives what they trained, in the order of their ids; it needs the memory of all updates.
        folded_with: a network's id and the ids of some clients to its state with the updates of these alone, folded as
            all are.
        found: what `Policies.find` found in them.
        memory: what the method remembers.
    """

    round: int
    seed: int
    lineages: tuple[Lineage, ...]
    networks: Mapping[str, Network]
    before: ModelState
    after: ModelState
    clients: tuple[Participant, ...]
    trained: Callable[[], tuple[Trained, ...]]
    folded_with: Callable[[str, Collection[str]], ModelState]
    found: Any = None
    memory: Any = None

    def stream(self, purpose: str) -> random.Random:
        """A stream of random numbers of its own for each purpose."""
        return stream_of(f"{self.seed}/{self.round}/evolving/{purpose}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolved:
    """What becomes of the networks.

    Attributes:
        after: the folded model, changed as the method will have it; networks neither appear nor retire in it.
        born: networks that appear: their ids were never used in the run, their parents were in use in the round, and
            what they take and answer is what the run's first network does. Each begins with what its `map` makes of
            its parent's weights in `after`.
        weights: by id, in place of that the first weights of networks that appear.
        retired: ids of networks that retire. At least one is in use afterwards.
    """

    after: ModelState
    born: tuple[Lineage, ...] = ()
    weights: Mapping[str, Mapping[str, Tensor]] = field(default_factory=lambda: MappingProxyType({}))
    retired: tuple[str, ...] = ()
