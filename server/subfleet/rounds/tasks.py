"""Requests and builds the tasks of a run, one function for each kind of work. Pure.

A task has the same id after a crash.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from subfleet.elastic.network import Network
from subfleet.elastic.norm_layers import norm_layers
from subfleet.methods.assigner import Draw
from subfleet.methods.roles import Trainee
from subfleet.protocol.calibration import Calibration
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, TaskSubmodel, Train, Work
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.rounds import work
from subfleet.rounds.awaiting import get_limit_s
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import estimate_size, get_network
from subfleet.rounds.state import ClientState, RunState, get_memory

BATCHES = 2
"""Number of batches whose gradients a score compares (Li et al., ICLR 2023, section 4)."""


def request_task(state: RunState, client: ClientState) -> work.ClientRequest | None:
    """Request the inputs of a client's next task; None if the client waits for no task."""
    target = client.offer.runtime
    if client.stage == "scoring" and client.task is None:
        return work.ScoringRequest(client_id=client.client_id, round=state.round, target=target, sizes=client.proposals)
    if client.stage != "preparing" or client.given is None or client.participant is None:
        return None
    if state.phase == "deploy":
        return work.ModelsRequest(participant=client.participant, round=state.round)
    if state.phase in ("evaluate", "search"):
        return work.EvaluationRequest(participant=client.participant, round=state.round, target=target)
    return work.TaskRequest(
        participant=client.participant,
        round=state.round,
        attempt=client.attempt,
        target=target,
        student=client.given.student,
    )


def request_tasks(state: RunState, clients: Iterable[ClientState]) -> tuple[work.ClientRequest, ...]:
    """Request the tasks of the clients that wait for one, by their ids."""
    requests = (request_task(state, client) for client in sorted(clients, key=lambda client: client.client_id))
    return tuple(request for request in requests if request is not None)


def build_train_task(
    context: RunContext,
    state: RunState,
    client: ClientState,
    prepared: work.PreparedTask,
    planned_bytes: int,
    now_s: float,
) -> Task:
    """The task that trains a client's submodel, or calibrates its norms in a round that calibrates."""
    if client.given is None:
        raise ValueError(f"client {client.client_id} has no submodel to train")
    size, architecture = client.given.size, client.given.architecture
    network = get_network(context, state.lineages, architecture).network
    trainee = Trainee(draw=build_draw(context, state, client), size=size, tensors=tuple(network.shapes(architecture)))
    settings = context.local_training(state.round, trainee, student=client.given.student)
    content: Work
    if context.config.calibrates(state.round):
        calibration = Calibration(norms=norm_layers(network, architecture))
        content = Calibrate(settings=settings, calibration=calibration)
    else:
        content = Train(
            settings=settings,
            update_codec=context.update_codec(network, architecture, client.offer.budget),
            sends=_list_sent(context, network, trainee),
            paths=client.given.paths,
        )
    task_id = f"{_name_attempt(context, state)}/{client.client_id}/{client.attempt}"
    submodels, limit_s = (_submodel(context, state, client, prepared),), get_limit_s(context, "training")
    return _build_task(context, state, client, content, submodels, planned_bytes, now_s, task_id, limit_s)


def build_draw(context: RunContext, state: RunState, client: ClientState) -> Draw:
    """The random numbers of a client in the open round."""
    memory = get_memory(context, state)
    return Draw(seed=context.config.seed, round=state.round, client_id=client.client_id, memory=memory)


def _list_sent(context: RunContext, network: Network, trainee: Trainee) -> tuple[str, ...]:
    """Names of the tensors with changes that the client sends, in order; empty if it sends all."""
    sends = context.roles.training.sends
    names = set(trainee.tensors) if sends is None else sends(trainee)
    sent = tuple(name for name in trainee.tensors if name in names and not network.tensors[name].frozen)
    return () if len(sent) == len(trainee.tensors) else sent


def build_score_task(
    context: RunContext, state: RunState, client: ClientState, planned_bytes: Mapping[work.Scorable, int], now_s: float
) -> Task:
    """The task that scores candidates.

    Args:
        context: the run context.
        state: the run's state.
        client: the client's state.
        planned_bytes: planned memory of each candidate, from the smallest candidate to the largest.
        now_s: monotonic time.
    """
    candidates = tuple(
        TaskSubmodel(
            architecture=candidate.size,
            program=candidate.program,
            weights=candidate.weights,
            forward_macs=estimate_size(context, state.lineages, candidate.size).forward_macs,
        )
        for candidate in planned_bytes
    )
    content = Score(settings=derive_score_training(context.training(state.round)), batches=BATCHES)
    most_bytes, limit_s = max(planned_bytes.values()), get_limit_s(context, "scores")
    task_id = name_score_task(context, state, client.client_id)
    return _build_task(context, state, client, content, candidates, most_bytes, now_s, task_id, limit_s)


def name_score_task(context: RunContext, state: RunState, client_id: str) -> str:
    """The id of a client's only score task in this attempt of the open round."""
    return f"{_name_attempt(context, state)}/{client_id}/score"


def derive_score_training(training: TrainingSettings) -> TrainingSettings:
    """The settings of scoring: batches as in local training, the plain objective, and no updates.

    Gradients are summed, so that a device can read them.
    """
    objective = replace(training.objective, label_smoothing=0.0, class_mask=False, proximal=False)
    return TrainingSettings(
        batch_size=training.batch_size,
        micro_batch_size=training.program_batch_size,
        learning_rate=0.0,
        objective=objective,
        optimiser=OptimiserSettings(momentum=0.0),
        recompute=training.recompute,
        seed=training.seed,
    )


def build_evaluate_task(
    context: RunContext,
    state: RunState,
    client: ClientState,
    prepared: work.PreparedTask,
    planned_bytes: int,
    now_s: float,
) -> Task:
    """The task that evaluates a client's submodel after a round, or the paths of a generation."""
    training = context.training(state.round)
    batch_size, objective = training.program_batch_size, training.objective
    scores, name = state.live.scores, "evaluate"
    if scores is not None and scores.proposed.generation is not None:
        name = f"generation{state.generations + 1}.{scores.closed}.{scores.proposed.ticket}"
        paths = scores.proposed.generation.paths
        settings = EvaluationSettings(batch_size=batch_size, population=paths, objective=objective.name)
    else:
        per_class = context.config.evaluation.per_class or objective.kind.by_class
        settings = EvaluationSettings(batch_size=batch_size, per_class=per_class, objective=objective.name)
    content, submodels = Evaluate(settings=settings), (_submodel(context, state, client, prepared),)
    task_id, limit_s = f"{context.run_id}/r{state.round}/{client.client_id}/{name}", get_limit_s(context, "evaluation")
    return _build_task(context, state, client, content, submodels, planned_bytes, now_s, task_id, limit_s)


def build_deploy_task(
    context: RunContext, state: RunState, client: ClientState, models: Sequence[ProgramRef], now_s: float
) -> Task:
    """The task that sends a client its own models."""
    architecture = client.architecture or context.space[0]
    submodels = tuple(TaskSubmodel(architecture=architecture, program=model) for model in models)
    task_id = f"{context.run_id}/deploy/{client.client_id}/{state.round}"  # an extended run deploys again
    limit_s = context.config.deadlines.deploy_s
    return _build_task(context, state, client, Deploy(), submodels, 0, now_s, task_id, limit_s)


def _submodel(context: RunContext, state: RunState, client: ClientState, prepared: work.PreparedTask) -> TaskSubmodel:
    architecture = client.architecture or context.space[0]
    return TaskSubmodel(
        architecture=architecture,
        program=prepared.program,
        weights=prepared.weights,
        frozen=prepared.frozen,
        forward_macs=estimate_size(context, state.lineages, architecture).forward_macs,
    )


def _build_task(  # noqa: PLR0913, PLR0917 - what differs between the five kinds of work
    context: RunContext,
    state: RunState,
    client: ClientState,
    content: Work,
    submodels: Sequence[TaskSubmodel],
    planned_bytes: int,
    now_s: float,
    task_id: str,
    limit_s: float,
) -> Task:
    return Task(
        task_id=task_id,
        run_id=context.run_id,
        round=state.round,
        client_id=client.client_id,
        submodels=tuple(submodels),
        work=content,
        planned_peak_bytes=planned_bytes,
        budget=client.offer.budget,
        deadline_s=max(0.0, limit_s - (now_s - state.live.begun_s.get(client.client_id, state.live.entered_s))),
        message_id=task_id,
        attempt=state.attempt,
        classes=context.config.data.classes,
        transform=context.config.data.transform,
    )


def _name_attempt(context: RunContext, state: RunState) -> str:
    return f"{context.run_id}/r{state.round}.{state.attempt}" if state.attempt else f"{context.run_id}/r{state.round}"
