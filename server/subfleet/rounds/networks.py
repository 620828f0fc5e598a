"""The networks of a run: the first ones, those in use, their costs, and when their programs can be given. Pure.

Unless a method changes networks, the run has the configured one only, and no lineage is stored.

A program that is written in one attempt of a round can be given from the next attempt on. Which attempt that is depends
on the speed of the exporter, unless the run is strict: then a round waits for the programs that its clients requested,
if the method asks for that. The attempts are in the journal and in the summary of the run; a run that is given them
plays the same rounds again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Drawn, Lineage
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import Participant
from subfleet.methods.run_networks import BeginContext, StandingContext
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import Declared, RunContext
from subfleet.rounds.live import TargetEstimates
from subfleet.rounds.state import ClientState, RunState, get_memory
from subfleet.rounds.work import CostRequest, NetworksRequest
from subfleet.search.candidates import Candidate, fits, order_candidates
from subfleet.search.estimates import Estimates, estimate_by_plans
from subfleet.search.query import CostEstimates
from subfleet.search.queue import SizedProgram, WrittenProgram

NOT_YET = "its network is not in the union model yet; it will be added next round if it fits"
"""Why a client is skipped in its first round."""


def list_lineages(context: RunContext, lineages: tuple[Lineage, ...]) -> tuple[Lineage, ...]:
    """The lineages of all networks of the run, beginning with the first."""
    return lineages or _list_first(context.config.model)


@lru_cache(maxsize=8)  # every step asks for it
def _list_first(config: AnyFamily) -> tuple[Lineage, ...]:
    return (Lineage(id="", config=config),)


def list_living_lineages(context: RunContext, state: RunState) -> tuple[Lineage, ...]:
    """The lineages of the networks in use, in the order in which they appeared."""
    return tuple(lineage for lineage in list_lineages(context, state.lineages) if lineage.living)


def list_networks(context: RunContext, state: RunState) -> tuple[Declared, ...]:
    """The networks in use: sizes may be chosen from them."""
    return tuple(context.get_declared(lineage) for lineage in list_living_lineages(context, state))


def map_networks(context: RunContext, state: RunState) -> Mapping[str, Network]:
    """The networks in use by their ids."""
    return MappingProxyType({declared.network.id: declared.network for declared in list_networks(context, state)})


def find_supernet(context: RunContext, state: RunState) -> Network | None:
    """The network in use with a choice of operators; None if there is none."""
    return next((declared.network for declared in list_networks(context, state) if declared.network.choices), None)


def get_network(context: RunContext, lineages: Iterable[Lineage], architecture: Architecture) -> Declared:
    """The network of a submodel, in use or retired.

    Raises:
        ValueError: the run never had the network.
    """
    if not architecture.network:
        return context.first
    lineage = next((lineage for lineage in lineages if lineage.id == architecture.network), None)
    if lineage is None:
        raise ValueError(
            f"submodel {architecture.name!r} belongs to network {architecture.network!r}, which the run never had"
        )
    return context.get_declared(lineage)


def estimate_size(context: RunContext, lineages: Iterable[Lineage], architecture: Architecture) -> Candidate:
    """The estimated cost of a submodel of any network of the run; memory is estimated from shapes."""
    return _recall_estimate(get_network(context, lineages, architecture).estimate, architecture)


@lru_cache(maxsize=64)  # asked for with each task and each row of the journal
def _recall_estimate(estimate: Estimates, architecture: Architecture) -> Candidate:
    return estimate(architecture)


def list_carriers(context: RunContext, clients: Iterable[ClientState], lineage: Lineage) -> tuple[str, ...]:
    """The clients with a budget for the largest size of a network, estimated from shapes."""
    largest = context.get_declared(lineage).candidates[-1]
    return tuple(client.client_id for client in clients if fits(largest, client.offer.runtime, client.offer.budget))


def find_own_size(context: RunContext, lineages: tuple[Lineage, ...], client: ClientState) -> Architecture | None:
    """The size of a network in use that a client has declared; None if it has declared none."""
    living = [lineage for lineage in list_lineages(context, lineages) if lineage.living]
    if client.offer.brought is None:
        return client.offer.architecture if any(not lineage.id for lineage in living) else None
    unions = (lineage for lineage in living if client.offer.brought in lineage.members)
    return next((context.get_declared(lineage).members[client.offer.brought] for lineage in unions), None)


def list_new_networks(context: RunContext, state: RunState) -> tuple[AnyFamily, ...]:
    """The networks that clients of the round bring and that no union contains yet, by the clients' ids."""
    clients = (client for _, client in sorted(state.clients.items()))
    new = (client.offer.brought for client in clients if find_own_size(context, state.lineages, client) is None)
    return tuple(dict.fromkeys(network for network in new if network is not None))


def find_standing(context: RunContext, state: RunState, client: ClientState) -> Participant | None:
    """A client with its own submodel between trainings, from an earlier client state.

    None if it had none, or if its network has retired and the method gives no other.
    """
    known = client.participant
    if known is None or not state.lineages:  # most runs have one network
        return known if known is None or context.network.is_path(known.architecture) else None
    networks = map_networks(context, state)
    if context.roles.networks.standing is None:
        return known if known.architecture.network in networks else None
    architecture = context.roles.networks.standing(
        StandingContext(
            seed=context.config.seed,
            client=known,
            networks=networks,
            ready=partial(_is_ready, context, state, client),
            declared=find_own_size(context, state.lineages, client),
            memory=get_memory(context, state),
        )
    )
    if architecture == known.architecture:
        return known
    declared = get_network(context, state.lineages, architecture)
    size = declared.network.size_of(architecture)
    # With the name that tables show.
    size = next((other for other in declared.space if other.architecture_id == size.architecture_id), size)
    return replace(known, architecture=architecture, size=size)


def _is_ready(context: RunContext, state: RunState, client: ClientState, size: Architecture) -> bool:
    """See `StandingContext.ready`."""
    if client.size is not None and size.architecture_id == client.size.architecture_id:
        return size.network in map_networks(context, state)
    written = state.written.get(SizedProgram(size=size, target=client.offer.runtime).key)
    if written is None or not is_available(context, state, written):
        return False
    budget = client.offer.budget
    planned_bytes = written.facts.plan_for(client.offer.packing_width).planned_peak_bytes
    fits_plan = planned_bytes is not None and planned_bytes <= budget.memory_bytes
    return fits_plan and fits(estimate_size(context, state.lineages, size), client.offer.runtime, budget)


def replace_lineages(context: RunContext, state: RunState, lineages: tuple[Lineage, ...]) -> RunState:
    """The state with the networks after a round, without programs and estimates of retired ones."""
    if lineages == state.lineages:
        return state
    state = replace(state, lineages=lineages)
    living = {lineage.id for lineage in list_living_lineages(context, state)}
    written = {key: entry for key, entry in state.written.items() if entry.program.size.network in living}
    lost = state.written.keys() - written.keys()
    programs = (state.written[key].program for key in lost)
    sizes = {SizedProgram(size=program.size, target=program.target).key for program in programs}
    of_written = {key: estimate for key, estimate in state.live.written_estimates.items() if key not in lost}
    estimates = {key: estimate for key, estimate in state.live.estimates.items() if key.rpartition("/")[0] in living}
    live = replace(state.live, written_estimates=MappingProxyType(of_written), estimates=MappingProxyType(estimates))
    return replace(
        state,
        pool=tuple(size for size in state.pool if size.architecture.network in living),
        queue=tuple(size for size in state.queue if size.size.network in living),
        written=MappingProxyType(written),
        live=live,
        unfit=MappingProxyType({key: why for key, why in state.unfit.items() if _parse_program_key(key) not in sizes}),
    )


def find_trainable_attempts(context: RunContext, state: RunState) -> dict[str, int]:
    """By network, the first attempt with a program that trains a size of it."""
    attempts: dict[str, int] = {}
    for written in state.written.values():
        name, attempt = written.program.size.network, find_first_attempt(context, written)
        if written.facts.planned_peak_bytes is not None and attempt != NEVER:
            attempts[name] = min(attempt, attempts.get(name, attempt))
    return attempts


def _parse_program_key(refusal: str) -> str:
    """The key of the program in a key of `RunState.unfit`."""
    *_, target, architecture_id = refusal.split("/")
    return f"{target}/{architecture_id}"


NEVER = 0
"""In place of an attempt: the program was not written in time for any attempt."""


def find_first_attempt(context: RunContext, written: WrittenProgram) -> int:
    """The first attempt in which a program can be given; 0 for never."""
    return context.config.programs_from.get(written.program.key, written.run_attempt + 1)


def is_available(context: RunContext, state: RunState, written: WrittenProgram) -> bool:
    """Whether a program was written early enough to be given in this attempt."""
    return NEVER < find_first_attempt(context, written) <= state.run_attempt


def has_awaited_programs(context: RunContext, state: RunState) -> bool:
    """Whether a round with all answers stays open for programs that are being written."""
    first_attempts = context.config.programs_from
    if first_attempts:
        return any(NEVER < first_attempts.get(program.key, NEVER) <= state.run_attempt + 1 for program in state.queue)
    return bool(state.queue) and context.config.strict and context.roles.assigner.awaits_programs


def list_first_attempts(context: RunContext, state: RunState) -> Mapping[str, int]:
    """The first attempt of each program, by its key, as `Run.programs_from` takes them."""
    attempts = {key: find_first_attempt(context, program) for key, program in state.written.items()}
    return dict(sorted({**{program.key: NEVER for program in state.queue}, **attempts}.items()))


def request_networks(context: RunContext, state: RunState) -> tuple[NetworksRequest, ...]:
    """Request the first networks before the clients of the first round are chosen; nothing if they are known."""
    begun = state.aggregated_round or state.lineages or state.live.begun_attempt == state.run_attempt
    if context.roles.networks.begin is None or begun or not _list_answered(state):
        return ()
    return (NetworksRequest(run_attempt=state.run_attempt),)


def choose_networks(context: RunContext, state: RunState) -> tuple[Lineage, ...]:
    """The networks that the method begins with; the configured network then retires before the first round.

    Args:
        context: the run context.
        state: the state with the answers of the first round's clients.

    Returns:
        The lineages of the networks; empty if the run begins with the configured one.

    Raises:
        ValueError: the method gives a network that cannot begin a run.
    """
    if context.roles.networks.begin is None:
        return ()
    clients = _list_answered(state)
    brought = {client.client_id: client.offer.brought for client in clients if client.offer.brought is not None}
    # With the budget that a log offers for most of its time, if it is known.
    lasting = [
        replace(client, offer=replace(client.offer, budget=client.offer.lasting or client.offer.budget))
        for client in clients
    ]
    lineages = context.roles.networks.begin(
        BeginContext(
            network=context.network,
            rates=context.config.rates,
            clients=tuple(client.client_id for client in clients),
            brought=MappingProxyType(brought),
            carried_by=partial(list_carriers, context, lasting),
        )
    )
    for lineage in lineages:
        _check(context, lineage)
        context.get_declared(lineage)  # slow, and cached
    (first,) = list_lineages(context, ())
    return (replace(first, retired_round=0), *lineages) if lineages else ()


def begin_with(
    context: RunContext, state: RunState, request: NetworksRequest, lineages: tuple[Lineage, ...]
) -> RunState:
    """The state in which the run begins with these networks; unchanged if it has begun.

    The configured network may have been given to clients in an earlier attempt; nothing of it remains.
    """
    if state.aggregated_round or state.lineages or request.run_attempt != state.run_attempt:
        return state
    state = replace_lineages(context, state, lineages)
    return replace(state, live=replace(state.live, begun_attempt=state.run_attempt))


def _list_answered(state: RunState) -> list[ClientState]:
    return [client for _, client in sorted(state.clients.items()) if client.stage == "answered"]


def _check(context: RunContext, lineage: Lineage) -> None:
    if not lineage.id or lineage.born_round or not lineage.living or not isinstance(lineage.map, Drawn):
        raise ValueError(
            f"a run cannot begin with network {lineage.id!r}: it must have an id, appear before the first round, "
            "be in use and have drawn weights"
        )
    config, first = lineage.config, context.config.model
    if (config.input_shape, config.class_count) != (first.input_shape, first.class_count):
        raise ValueError(f"network {lineage.id!r} has other inputs or classes than the configuration")


def request_estimates(context: RunContext, state: RunState, target: str) -> tuple[CostRequest, ...]:
    """Request the cost estimates that sizes for a target are chosen by; nothing if all are known."""
    if not context.roles.assigner.planned_estimates:
        return ()
    living = list_living_lineages(context, state)
    requests = (CostRequest(target=target, lineage=lineage if lineage.id else None) for lineage in living)
    return tuple(request for request in requests if request.key not in state.live.estimates)


def get_estimates(context: RunContext, state: RunState, target: str) -> CostEstimates:
    """The cost of any size on a target with known estimates."""
    estimates = {key: costs.estimate for key, costs in _get_costs(context, state, target).items()}
    if len(estimates) == 1:
        return next(iter(estimates.values()))
    return lambda architecture: estimates[architecture.network](architecture)


def list_candidates(context: RunContext, state: RunState, target: str) -> Sequence[Candidate]:
    """The method's space, from smallest to largest, with its costs on a target with known estimates."""
    spaces = [costs.candidates for costs in _get_costs(context, state, target).values()]
    return spaces[0] if len(spaces) == 1 else order_candidates([size for space in spaces for size in space])


def build_target_estimates(
    context: RunContext, request: CostRequest, memory: MemoryEstimates | None, problem: str = ""
) -> TargetEstimates:
    """The estimates of a network on a target; without memory estimates, the target can train nothing."""
    declared = context.get_declared(request.lineage)
    estimate = replace(declared.estimate, memory=estimate_by_plans(declared.network, request.target, memory))
    return TargetEstimates(estimate=estimate, candidates=tuple(map(estimate, declared.space)), problem=problem)


def _get_costs(context: RunContext, state: RunState, target: str) -> Mapping[str, Declared | TargetEstimates]:
    """The known costs of each network in use, on a target."""
    living = list_living_lineages(context, state)
    if not context.roles.assigner.planned_estimates:
        return {lineage.id: context.get_declared(lineage) for lineage in living}
    return {lineage.id: state.live.estimates[CostRequest(target=target, lineage=lineage).key] for lineage in living}
