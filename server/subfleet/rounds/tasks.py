"""Builds the tasks of a run, one function for each kind of work. Pure: the same task has the same id after a crash."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from subfleet.methods.assigner import Draw
from subfleet.methods.local_training import Trainee
from subfleet.methods.techniques import calibration_of
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.exhaustive import never
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, ScoringCandidate, Task, Train, Work
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.rounds.awaiting import limit_s
from subfleet.rounds.networks import declared_of
from subfleet.rounds.state import RunState, Seat, remembered
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import PreparedTask, Scorable

__all__ = [
    "BATCHES",
    "deploy_task",
    "draw_of",
    "evaluate_task",
    "score_task",
    "score_task_id",
    "score_training",
    "train_task",
]

BATCHES = 2
"""Number of batches whose gradients a score compares (Li et al., ICLR 2023, section 4)."""


def train_task(terms: Terms, state: RunState, seat: Seat, made: PreparedTask, planned_bytes: int, now_s: float) -> Task:
    """The task that trains a client's subnet, or calibrates its norms in a round that calibrates."""
    if seat.given is None:
        raise ValueError(f"client {seat.client_id} has no submodel to train")
    size, spec = seat.given.size, seat.given.spec
    network = declared_of(terms, state.lineages, spec).network
    trainee = Trainee(draw=draw_of(terms, state, seat), size=size, tensors=tuple(network.shapes(spec)))
    settings = terms.local_training(state.round, trainee, student=seat.given.student)
    work: Work
    if terms.config.calibrates(state.round):
        calibration = calibration_of(network, spec)
        work = Calibrate(program=made.program, weights=made.weights, settings=settings, calibration=calibration)
    else:
        work = Train(
            program=made.program,
            weights=made.weights,
            settings=settings,
            update_codec=terms.update_codec(network, spec, _budget(seat)),
            sends=_sent(terms, trainee),
            paths=seat.given.paths,
        )
    return _task(terms, state, seat, work, planned_bytes, now_s)


def draw_of(terms: Terms, state: RunState, seat: Seat) -> Draw:
    """The random numbers of a client in the open round."""
    memory = remembered(terms, state)
    return Draw(seed=terms.config.seed, round=state.round, client_id=seat.client_id, memory=memory)


def _sent(terms: Terms, trainee: Trainee) -> tuple[str, ...]:
    """Names of the tensors whose change the client sends, in order; empty where it sends all."""
    if terms.roles.training.sends is None:
        return ()
    sent = terms.roles.training.sends(trainee)
    return () if sent >= set(trainee.tensors) else tuple(name for name in trainee.tensors if name in sent)


def score_task(terms: Terms, state: RunState, seat: Seat, planned_bytes: Mapping[Scorable, int], now_s: float) -> Task:
    """The task that scores candidates.

    Args:
        terms: of the run.
        state: of the run.
        seat: of the client.
        planned_bytes: planned memory of each candidate, from the smallest candidate to the largest.
        now_s: monotonic time.
    """
    candidates = tuple(
        ScoringCandidate(spec=one.size, program=one.program, weights=one.weights) for one in planned_bytes
    )
    work = Score(candidates=candidates, settings=score_training(terms.training(state.round)), batches=BATCHES)
    return _task(terms, state, seat, work, max(planned_bytes.values()), now_s)


def score_task_id(terms: Terms, state: RunState, client_id: str) -> str:
    """The id of a client's only score task in this attempt of the open round."""
    return f"{_attempt_id(terms, state)}/{client_id}/score"


def score_training(training: TrainingSettings) -> TrainingSettings:
    """The batches of a round's local training, with the plain objective and an optimiser without state.

    Nothing is updated. Gradients are summed, which is how a device gets to see them.
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


def evaluate_task(
    terms: Terms, state: RunState, seat: Seat, made: PreparedTask, planned_bytes: int, now_s: float
) -> Task:
    """The task that evaluates a client's subnet after a round, or the paths of a generation."""
    training = terms.training(state.round)
    batch_size, objective = training.program_batch_size, training.objective
    generation = state.live.scores.made.generation if state.live.scores is not None else None
    if generation is not None:
        settings = EvaluationSettings(batch_size=batch_size, population=generation.paths, objective=objective.name)
    else:
        per_class = terms.config.evaluation.per_class or objective.kind.by_class
        settings = EvaluationSettings(batch_size=batch_size, per_class=per_class, objective=objective.name)
    work = Evaluate(program=made.program, weights=made.weights, settings=settings)
    return _task(terms, state, seat, work, planned_bytes, now_s)


def deploy_task(terms: Terms, state: RunState, seat: Seat, models: Sequence[ProgramRef], now_s: float) -> Task:
    """The task that brings a client its own models."""
    return _task(terms, state, seat, Deploy(models=tuple(models)), 0, now_s)


def _task(terms: Terms, state: RunState, seat: Seat, work: Work, planned_bytes: int, now_s: float) -> Task:
    spec = work.candidates[-1].spec if isinstance(work, Score) else seat.spec
    task_id, limit = _id_and_limit_s(terms, state, seat, work)
    return Task(
        task_id=task_id,
        run_id=terms.run_id,
        round=state.round,
        client_id=seat.client_id,
        spec=spec or terms.space[0],
        work=work,
        planned_peak_bytes=planned_bytes,
        budget=_budget(seat),
        deadline_s=max(0.0, limit - (now_s - state.live.entered_s)),
        message_id=task_id,
        retry=state.retry,
        classes=terms.config.data.classes,
        transform=terms.config.data.transform,
    )


def _id_and_limit_s(terms: Terms, state: RunState, seat: Seat, work: Work) -> tuple[str, float]:
    """The id of a client's task, and its deadline in seconds from the beginning of the phase."""
    client_id, deadlines = seat.client_id, terms.config.deadlines
    match work:
        case Train() | Calibrate():
            task_id = f"{_attempt_id(terms, state)}/{client_id}/{seat.attempt}"
            limit = limit_s(terms, "training")
        case Score():
            task_id, limit = score_task_id(terms, state, client_id), limit_s(terms, "scores")
        case Evaluate():
            task_id = f"{terms.run_id}/r{state.round}/{client_id}/{_evaluation_name(state)}"
            limit = deadlines.evaluate_s
        case Deploy():  # a run that is given more rounds has another one after them
            task_id, limit = f"{terms.run_id}/deploy/{client_id}/{state.round}", deadlines.deploy_s
        case _:
            never(work)
    return task_id, limit


def _evaluation_name(state: RunState) -> str:
    """Tells the evaluation after a round from those of the generations that are scored in it."""
    scores = state.live.scores
    if scores is None:
        return "evaluate"
    return f"generation{state.generations + 1}.{scores.closed}.{scores.made.ticket}"


def _budget(seat: Seat) -> Budget:
    return seat.offer.budget or Budget(memory_bytes=0)


def _attempt_id(terms: Terms, state: RunState) -> str:
    return f"{terms.run_id}/r{state.round}.{state.retry}" if state.retry else f"{terms.run_id}/r{state.round}"
