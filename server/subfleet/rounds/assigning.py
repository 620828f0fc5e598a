"""Assigns submodels to clients: chosen by the method, checked against the program's plan, replaced if refused. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from subfleet.methods.assigner import Assignment, AssignmentContext, WrittenSize
from subfleet.protocol.messages import Refusal
from subfleet.protocol.text import make_printable
from subfleet.rounds import networks, obstacles
from subfleet.rounds.context import RunContext
from subfleet.rounds.offers import MOST_CHARACTERS
from subfleet.rounds.signals import ClientOutcome, SendTask
from subfleet.rounds.state import ClientState, Lasts, RunState, Submodel
from subfleet.rounds.tasks import build_draw, build_train_task, request_tasks
from subfleet.rounds.work import PreparedTask
from subfleet.search.candidates import LIMITS, Candidate, Limit, list_lacking_operators
from subfleet.search.queue import ProgramFacts


def assign_client(context: RunContext, state: RunState, client: ClientState) -> ClientOutcome:
    """Choose a submodel for a client that has answered."""
    if client.offer.brought is not None and networks.find_own_size(context, state.lineages, client) is None:
        return replace(client, stage="skipped", reason=networks.NOT_YET), ()
    question = build_question(context, state, client)
    assigned = context.roles.assigner.assign(question)
    return give_size(context, state, replace(client, first_requested=assigned.requested), question, assigned)


def send_training(
    context: RunContext, state: RunState, client: ClientState, prepared: PreparedTask, now_s: float
) -> ClientOutcome:
    """Send the training task if the program's plan fits and the runtime has its operators; else look below."""
    facts = prepared.facts
    operators = obstacles.get_operators(state, client.client_id)
    if lacking := list_lacking_operators(facts.operators, operators):
        return _choose_runnable(context, state, client, lacking)
    planned_bytes = obstacles.plan_bytes(client, facts, operators, lambda room: room.least_peak_bytes)
    if planned_bytes is None or planned_bytes > _limit_memory(context, state, client):
        return _choose_another(context, state, client, facts, "memory")
    task = build_train_task(context, state, client, prepared, planned_bytes, now_s)
    if (limit := obstacles.find_objection(context, state, client, task)) is not None:
        return _choose_another(context, state, client, facts, limit)
    return replace(client, stage="out", task=task, reason=""), (SendTask(task=task),)


def _choose_another(
    context: RunContext, state: RunState, client: ClientState, facts: ProgramFacts, limit: Limit
) -> ClientOutcome:
    """Choose another size in place of one that exceeds a limit; or another subspace of the same supernet."""
    if facts.chain is not None:
        return _choose_subspace(context, state, client, facts)
    return choose_below(context, state, client, limit)


def _choose_subspace(context: RunContext, state: RunState, client: ClientState, facts: ProgramFacts) -> ClientOutcome:
    """Choose another subspace, by the facts of its own program alone."""
    size = client.size
    if size is None or client.attempt + 1 >= context.config.max_attempts:
        reason = "none of the subspaces chosen for it fits, or its runtime lacks an operator"
        return replace(client, stage="skipped", given=None, reason=reason), ()
    question = build_question(context, state, client)
    known = WrittenSize(size=size, facts=facts)
    question = replace(question, written=MappingProxyType({**question.written, size.architecture_id: known}))
    client = replace(client, attempt=client.attempt + 1)
    return give_size(context, state, client, question, context.roles.assigner.assign(question))


def _limit_memory(context: RunContext, state: RunState, client: ClientState) -> int:
    """The memory that a program may plan: the free memory and, for a size that the client keeps, the memory in its log.

    The smallest size is kept whatever the log contains, since there is no smaller one.
    """
    room_bytes = client.offer.budget.memory_bytes
    smallest = networks.list_candidates(context, state, client.offer.runtime)[0].architecture
    if client.offer.lasting is None or client.client_id in state.last or client.size == smallest:
        return room_bytes
    return min(room_bytes, client.offer.lasting.memory_bytes)


def _choose_runnable(
    context: RunContext, state: RunState, client: ClientState, lacking: Sequence[str]
) -> ClientOutcome:
    """Choose another submodel while attempts are left: submodels of one network mostly call the same operators."""
    reason = f"its runtime {client.offer.runtime!r} lacks {', '.join(lacking)}, which the program calls"
    skipped = replace(client, stage="skipped", given=None, reason=reason[:MOST_CHARACTERS])
    if client.attempt + 1 >= context.config.max_attempts:
        return skipped, ()
    chosen, actions = choose_below(context, state, replace(client, attempt=client.attempt + 1), "runtime")
    return (chosen, actions) if chosen.open else (skipped, ())


def build_question(context: RunContext, state: RunState, client: ClientState) -> AssignmentContext:
    """The question to a method: which submodel for this client? Cost estimates of its target must be known."""
    last = state.last.get(client.client_id)
    known = None if last is None else networks.find_standing(context, state, last)
    written = {
        entry.program.size.architecture_id: WrittenSize(
            size=entry.program.size,
            facts=entry.facts.plan_for(client.offer.packing_width),
            estimate=state.live.written_estimates.get(key),
        )
        for key, entry in state.written.items()
        if entry.program.target == client.offer.runtime
        and entry.program.student is None
        and networks.is_available(context, state, entry)
    }
    return AssignmentContext(
        networks=networks.map_networks(context, state),
        candidates=networks.list_candidates(context, state, client.offer.runtime),
        estimate=networks.get_estimates(context, state, client.offer.runtime),
        draw=build_draw(context, state, client),
        target=client.offer.runtime,
        budget=client.offer.budget,
        previous=known.size if known is not None else None,
        search=state.live.searches.get(client.offer.runtime),
        written=MappingProxyType(written),
        operators=obstacles.get_operators(state, client.client_id),
        refused=obstacles.list_unfit_sizes(state, client.client_id, client.offer.runtime),
        declared=networks.find_own_size(context, state.lineages, client),
        lasting=client.offer.lasting,
    )


def choose_below(context: RunContext, state: RunState, client: ClientState, limit: Limit) -> ClientOutcome:
    """Choose a smaller submodel among those known when the round began, so the order of answers does not matter."""
    question = build_question(context, state, client)
    below = None if client.size is None else question.estimate(client.size)
    question = replace(question, below=below, below_limit=limit)
    return give_size(context, state, client, question, context.roles.assigner.assign(question))


def give_size(
    context: RunContext, state: RunState, client: ClientState, question: AssignmentContext, assigned: Assignment
) -> ClientOutcome:
    """Give a client the submodel that was chosen; skip the client if there is none."""
    if assigned.candidate is not None:
        question = question.of_network(assigned.candidate.architecture.network)
    client = replace(client, limit=find_deciding_limit(question, assigned.candidate, assigned.only))
    if assigned.candidate is None:
        reason = (assigned.reason or _explain_none(state, client, question))[:MOST_CHARACTERS]
        lasts: Lasts = "lasting" if obstacles.is_exhausted(question, assigned.only) else "passing"
        return replace(client, stage="skipped", given=None, reason=reason, lasts=lasts), ()
    size, draw = assigned.candidate.architecture, build_draw(context, state, client)
    network = question.networks[size.network]
    submodel = Submodel(
        size=size,
        architecture=assigned.placed or context.roles.assigner.place(network, size, draw),
        student=context.roles.training.student(network, size, draw),
        paths=assigned.paths,
        requested=assigned.requested,
    )
    client = replace(client, stage="preparing", given=submodel, task=None)
    return client, request_tasks(state, [client])


def _explain_none(state: RunState, client: ClientState, question: AssignmentContext) -> str:
    estimates = sorted(state.live.estimates.items())
    problems = [estimate.problem for key, estimate in estimates if key.endswith(client.offer.runtime)]
    if problems and all(problems):
        return problems[0]
    if question.below is not None:
        return f"no submodel below {question.below.architecture.name!r} fits: its program {question.below_reason}"
    why = question.why_not(question.candidates[0]) or "was not chosen by the method"
    return f"no submodel fits: the smallest {why}"


BY_METHOD = "method"
"""A larger size would have fitted, but the method chose another."""


def find_deciding_limit(question: AssignmentContext, chosen: Candidate | None, only: Candidate | None = None) -> str:
    """The limits that keep a client from a larger size.

    A limit decides if it alone excludes a larger size. If every larger size exceeds several limits, these decide
    together.

    Args:
        question: the question to the method.
        chosen: its choice; None if nothing fits.
        only: if nothing fits, the one size that the method considered.

    Returns:
        Names of limits joined by "+", "method", or an empty text if the largest size was given.
    """
    if chosen is None and only is not None:
        return "+".join(limit for limit in LIMITS if limit in question.find_exceeded(only))
    sizes = (candidate for candidate in question.candidates if chosen is None or candidate.order > chosen.order)
    larger = [question.find_exceeded(candidate) for candidate in sizes]
    if not all(larger):
        return BY_METHOD
    alone = frozenset[str]().union(*(limits for limits in larger if len(limits) == 1))
    decides = alone or frozenset[str]().union(*larger)
    return "+".join(limit for limit in LIMITS if limit in decides)


def describe_refusal(refusal: Refusal) -> str:
    """A refusal in words, without control characters, so that terminals can show it."""
    return f"{refusal.reason}: {make_printable(refusal.detail)}"[:MOST_CHARACTERS]


def answer_refusal(context: RunContext, state: RunState, client: ClientState, refusal: Refusal) -> ClientOutcome:
    """Choose a smaller task if that may help, and a smaller size and attempts are left; else close the client state.

    The state already contains the programs that the device cannot run.
    """
    effect = obstacles.REFUSALS[refusal.reason]
    final = replace(client, stage="refused", reason=describe_refusal(refusal))
    if state.phase != "train":
        return final, ()
    more = client.attempt + 1 < context.config.max_attempts
    if effect.limit is not None and more and client.size:
        smaller = lower_budget(replace(client, attempt=client.attempt + 1), refusal)
        chosen, actions = choose_below(context, state, smaller, effect.limit)
        if chosen.open:
            return chosen, actions
    lasts = find_lasting(context, state, client) if effect.limit in obstacles.LASTING_LIMITS else effect.lasts
    return replace(final, lasts=lasts), ()


def find_lasting(context: RunContext, state: RunState, client: ClientState) -> Lasts:
    """Whether another attempt has the same outcome, because no other size is left for the device."""
    question = build_question(context, state, client)
    assigned = context.roles.assigner.assign(question)
    can_retry = assigned.candidate is not None or not obstacles.is_exhausted(question, assigned.only)
    return "passing" if can_retry else "lasting"


def lower_budget(client: ClientState, refusal: Refusal) -> ClientState:
    """The client state with its budget lowered to the free bytes that a refusal reports."""
    available_bytes = refusal.available_bytes
    if available_bytes is None:
        return client
    free_bytes, budget = max(0, available_bytes), client.offer.budget
    if refusal.reason == "memory":
        budget = replace(budget, memory_bytes=min(budget.memory_bytes, free_bytes))
    elif refusal.reason == "disk":
        disk_bytes = free_bytes if budget.disk_bytes is None else min(budget.disk_bytes, free_bytes)
        budget = replace(budget, disk_bytes=disk_bytes)
    return replace(client, offer=replace(client.offer, budget=budget))


def remember_disk(state: RunState, refusal: Refusal) -> RunState:
    """The state that remembers the free bytes of a device's disk, for rounds in which it does not report them."""
    if refusal.reason != "disk" or refusal.available_bytes is None:
        return state
    known = {**state.disks, refusal.client_id: max(0, refusal.available_bytes)}
    return replace(state, disks=MappingProxyType(known))
