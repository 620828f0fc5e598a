"""What devices declare when they join, subnets or networks of their own: judged by the run and its method. Pure."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.messages import ArchitectureProblem, Profile
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.subnet import Explicit, Full, IndexSet, Roll, SubnetSpec
from subfleet.rounds.actions import Reply
from subfleet.rounds.answers import Verdict, reply
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.terms import Terms
from subfleet.settings.published import network_brought

__all__ = ["MOST_NETWORKS", "Declaration", "declaration_of", "declaration_reply", "with_brought"]

MOST_NETWORKS = 4
"""Of its own that one member may declare in a run: each may be one more union, which the server keeps."""
_OTHERWISE: ArchitectureProblem = "not_in_space"
_MOST_CHARACTERS = 400  # of a reason, as it stands in tables and logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a declared architecture is in a run.

    Attributes:
        size: of the method's space; None where there is none.
        network: of the device's own; None where it declares none that can take part.
        problem: why there is none; None where the device declares nothing.
        reason: the same in words.
    """

    size: SubnetSpec | None = None
    network: AnyFamily | None = None
    problem: ArchitectureProblem | None = None
    reason: str = ""


def declaration_of(terms: Terms, profile: Profile, before: tuple[str, ...] = ()) -> Declaration:
    """Judge what a device declares. Wherever on an axis a subnet lies, it is the size that counts.

    Args:
        terms: of the run.
        profile: of the device.
        before: digests of the networks of its own that it has declared before, see `with_brought`.
    """
    architecture = profile.architecture
    if architecture is None and not profile.network:
        return Declaration(
            reason="the method goes by declared architectures, but the device declares none; name it with "
            "--architecture, or in its profile"
        )
    if not terms.roles.assigner.declarations:
        return Declaration(
            problem="not_used",
            reason=f"the run's method {terms.config.method.TYPE!r} goes by no declarations, and gives what fits",
        )
    if architecture is None:
        return _network_of(terms, profile.network, before)
    try:
        size = terms.network.size_of(architecture)
    except ConfigError as error:
        problems = (*_problems(terms.network, architecture), _OTHERWISE)
        return Declaration(problem=problems[0], reason=_told(str(error)))
    known = next((one for one in terms.space if (one.axes, one.blocks) == (size.axes, size.blocks)), None)
    if known is None:
        smallest, largest = terms.space[0].name, terms.space[-1].name
        return Declaration(
            problem="not_in_space",
            reason=_told(
                f"the declared architecture is none of the {len(terms.space)} sizes of the run, from {smallest!r} to "
                f"{largest!r}; declare one of those that `subfleet preflight --json` lists, or change its rates"
            ),
        )
    return Declaration(size=known)


def declaration_reply(terms: Terms, profile: Profile, before: tuple[str, ...] = ()) -> tuple[Reply, ...]:
    """The answer to a profile that declares an architecture; none to others. The arguments are `declaration_of`'s."""
    if profile.architecture is None and not profile.network:
        return ()
    found = declaration_of(terms, profile, before)
    status: Verdict = "refused" if found.size is None and found.network is None else "accepted"
    return (reply(profile.client_id, profile.message_id, status, found.reason, problem=found.problem),)


def with_brought(state: RunState, seat: Seat) -> RunState:
    """The state that remembers the network that a client brings."""
    known = state.brought.get(seat.client_id, ())
    if seat.offer.brought is None or (digest := _digest(seat.offer.brought)) in known:
        return state
    return replace(state, brought=MappingProxyType({**state.brought, seat.client_id: (*known, digest)}))


def _network_of(terms: Terms, text: str, before: tuple[str, ...]) -> Declaration:
    try:
        network = network_brought(text, terms.config.model)
    except ConfigError as error:
        return Declaration(problem="no_network", reason=_told(f"the network that it declares is none: {error}"))
    if len(before) >= MOST_NETWORKS and _digest(network) not in before:
        return Declaration(
            problem="too_many",
            reason=f"it has declared {len(before)} networks in this run and declares another, but may declare "
            f"{MOST_NETWORKS}; declare one of those again",
        )
    return Declaration(network=network)


@lru_cache(maxsize=2**12)  # each heartbeat of a client says it again
def _digest(network: AnyFamily) -> str:
    return hashlib.sha256(canonical_json(network)).hexdigest()[:16]


def _problems(network: Network, spec: SubnetSpec) -> Iterator[ArchitectureProblem]:
    """What is wrong with a spec that is no subnet, the most telling first; nothing of groups and orders."""
    if any(name not in network.axes for name, _ in spec.axes):
        yield "unknown_axis"
    if spec.choices or not set(spec.blocks) <= {block.name for block in network.blocks}:
        yield "unknown_block"
    if any(_needed_size(index_set) > network.axes[name].size for name, index_set in spec.axes if name in network.axes):
        yield "too_large"


def _needed_size(index_set: IndexSet) -> int:
    """How long an axis must be to have these indices."""
    if isinstance(index_set, Full):
        return 0
    if isinstance(index_set, Explicit):
        return max(index_set.indices) + 1
    return max(index_set.size, index_set.start + 1) if isinstance(index_set, Roll) else index_set.size


def _told(text: str) -> str:
    """What stands in a message and in tables: neither long nor with characters that act."""
    return "".join(character if character.isprintable() else " " for character in text)[:_MOST_CHARACTERS]
