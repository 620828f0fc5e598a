"""Why a device cannot train a subnet: a limit that the cheapest one breaks, or an operator that its runtime lacks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from subfleet.server.assignment import Candidate
from subfleet.server.search.limits import INFINITE_BYTES
from subfleet.server.search.query import Query

__all__ = ["Needs", "Preflights", "lacking_operators", "refusal", "why_not"]

Needs = Callable[[Candidate, str], Iterable[str]]
"""The operators of a subnet's program for a target."""


def lacking_operators(needed: Iterable[str], listed: Iterable[str] | None) -> tuple[str, ...]:
    """Operators that a program calls and a runtime lacks, sorted; none where the runtime lists nothing."""
    return () if listed is None else tuple(sorted(set(needed) - set(listed)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflights:
    """What devices have told about programs that they tried, so that none is asked twice. Plain data.

    Attributes:
        results: by "device/target/subnet's id", why it cannot train it; empty where it can.
        lacking: by "device/target", operators that its runtime was found to lack: what other subnets need, too.
        limit: results that are kept at most; the oldest goes first.
    """

    results: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    limit: int = 10_000

    def known(self, device: str, target: str, spec_id: str) -> str | None:
        """Why a device cannot train a subnet, empty where it can; None where it was not asked."""
        return self.results.get(f"{device}/{target}/{spec_id}")

    def told(
        self, device: str, target: str, spec_id: str, *, reason: str = "", operators: Iterable[str] = ()
    ) -> "Preflights":
        """With one more result.

        Args:
            device: id of the client.
            target: that it runs.
            spec_id: of the subnet.
            reason: why it cannot train it; empty where it can.
            operators: that its runtime lacks.
        """
        results = {**self.results, f"{device}/{target}/{spec_id}": reason}
        if len(results) > self.limit:
            results.pop(next(iter(results)))
        lacking = dict(self.lacking)
        found = set(operators) | set(lacking.get(f"{device}/{target}", ()))
        if found:
            lacking[f"{device}/{target}"] = tuple(sorted(found))
        return replace(self, results=MappingProxyType(results), lacking=MappingProxyType(lacking))


def refusal(
    device: str, target: str, *, preflights: Preflights, needs: Needs, listed: Iterable[str] | None = None
) -> Callable[[Candidate], str]:
    """What a query refuses for one device: subnets that failed there, and those that need an operator it lacks.

    Args:
        device: id of the client.
        target: that it runs.
        preflights: remembered results.
        needs: operators of a subnet's program.
        listed: operators that the device's profile lists; None lists nothing, and everything is tried.
    """
    known = None if listed is None else frozenset(listed)
    found = frozenset(preflights.lacking.get(f"{device}/{target}", ()))

    def refused(candidate: Candidate) -> str:
        needed = frozenset(needs(candidate, target))
        lacking = sorted({*lacking_operators(needed, known), *(needed & found)})
        if lacking:
            return f"the runtime {target!r} of {device!r} lacks {', '.join(lacking)}"
        return preflights.known(device, target, candidate.spec.spec_id) or ""

    return refused


def why_not(candidate: Candidate, query: Query) -> str:
    """Why a device cannot be given a subnet, in one sentence; empty where it can.

    Asked of the smallest subnet, it is why the device is skipped.
    """
    refused = query.refused(candidate)
    limits, moved = query.limits, candidate.weight_bytes
    need_bytes = candidate.training_memory_bytes.get(query.target, INFINITE_BYTES)
    macs = candidate.forward_macs * limits.round_macs_per_forward
    seconds = moved * limits.seconds_per_byte + candidate.forward_macs * limits.seconds_per_mac
    if need_bytes >= INFINITE_BYTES:
        refused = refused or f"the runtime {query.target!r} cannot train this model"
    elif need_bytes > limits.memory_bytes:
        refused = refused or f"it needs {need_bytes} bytes of memory and the budget is {limits.memory_bytes}"
    if refused:
        return refused
    for way, link_bytes in (("down", limits.downlink_bytes), ("up", limits.uplink_bytes)):
        if link_bytes is not None and moved > link_bytes:
            return f"it moves {moved} bytes {way} and the link's budget is {link_bytes}"
    if limits.train_macs is not None and macs > limits.train_macs:
        return f"training takes {macs} multiply-accumulates and the budget is {limits.train_macs}"
    if limits.deadline_s is not None and seconds > limits.deadline_s:
        return f"training and transfers take {seconds:.3g} s and the deadline is {limits.deadline_s:.3g} s"
    if query.below_parameters is not None and candidate.parameters >= query.below_parameters:
        return f"it has {candidate.parameters} parameters and must have fewer than {query.below_parameters}"
    return ""
