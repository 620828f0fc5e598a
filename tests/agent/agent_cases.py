"""Messages and small steps that the agent's tests share."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from subfleet.agent.actions import Action, Measure, MeasureForRound, MeasureForTask, Weigh
from subfleet.agent.events import BlobArrived, Event, LinkUp, Measured, Received, Weighed
from subfleet.agent.outcomes import EvaluationEnded, ScoringEnded, TrainingEnded
from subfleet.agent.states import AgentSettings, AgentState, Saved
from subfleet.agent.stepping import start, step
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.calibration import Calibration, NormLayer
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.evaluating import EvaluationResult, EvaluationSettings
from subfleet.protocol.jobs import TrainResult
from subfleet.protocol.messages import Ack, Profile, RoundInfo
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget, Reading
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Calibrate, Deploy, Evaluate, Score, Task, TaskSubmodel, Train, Work
from subfleet.protocol.training import TrainingSettings

RESULT = TrainResult(sample_count=20, step_count=2, loss=1.5, accuracy=0.5, measured_peak_bytes=700, train_seconds=0.1)

EVALUATION = EvaluationResult(
    loss=0.5,
    accuracy=0.75,
    sample_count=4,
    label_count=4,
    measured_peak_bytes=300,
    class_counts=(1, 3),
    class_correct=(0, 3),
)

SCORES = (CandidateScore(score=1.5), CandidateScore(score=None, reason="it broke"))


def profile(session_id: str = "s1") -> Profile:
    return Profile(
        client_id="pi",
        session_id=session_id,
        device="raspberry_pi_4",
        runtimes=("fake",),
        sample_count=20,
        class_counts=(10, 10),
        input_shape=(1, 2, 2),
        memory_total_bytes=10**9,
        memory_fraction=0.5,
        message_id=f"profile.{session_id}",
        held_out_count=4,
    )


def blob(text: str) -> BlobRef:
    return BlobRef.of(text.encode())


def announce(
    number: int = 1,
    phase: Literal["measure", "train", "finished"] = "measure",
    run_id: str = "run",
    log_time_s: float | None = 10.0,
    log_quantile: float | None = None,
    asynchronous: bool = False,
) -> RoundInfo:
    return RoundInfo(
        run_id=run_id, round=number, round_count=3, phase=phase, log_time_s=log_time_s, deadline_s=30.0,
        message_id=f"{run_id}/{number}/{phase}", log_quantile=log_quantile, asynchronous=asynchronous,
    )  # fmt: skip


PROGRAM = ProgramRef(program_id="p", target="fake", blob=blob("program"))


def _task(
    name: str, number: int, work: Work, changes: dict[str, Any], submodels: tuple[TaskSubmodel, ...] = ()
) -> Task:
    """A task with this work; a change applies to the work or the submodel if it has the field, else to the envelope."""
    submodel = TaskSubmodel(architecture=Architecture(name="w1/2 d1"), program=PROGRAM, weights=blob(f"weights {name}"))
    submodel_fields = {part.name for part in fields(submodel)} & changes.keys()
    submodels = submodels or (replace(submodel, **{key: changes.pop(key) for key in submodel_fields}),)
    work_fields = {part.name for part in fields(work)}
    values: dict[str, Any] = {
        "task_id": name,
        "run_id": "run",
        "round": number,
        "client_id": "pi",
        "submodels": submodels,
        "work": replace(work, **{key: value for key, value in changes.items() if key in work_fields}),
        "planned_peak_bytes": 500,
        "budget": Budget(memory_bytes=1000),
        "deadline_s": 60.0,
        "message_id": f"m-{name}",
    }
    return Task(**{**values, **{key: value for key, value in changes.items() if key not in work_fields}})


def with_work(task: Task, **changes: Any) -> Task:
    """The task with other values in its work."""
    return replace(task, work=replace(task.work, **changes))


def with_submodel(task: Task, **changes: Any) -> Task:
    """The task with other values in its only submodel."""
    (submodel,) = task.submodels
    return replace(task, submodels=(replace(submodel, **changes),))


def train_task(name: str = "t1", number: int = 1, **changes: Any) -> Task:
    return _task(name, number, Train(settings=TrainingSettings()), changes)


def calibrate_task(name: str = "c1", number: int = 1, **changes: Any) -> Task:
    norms = (NormLayer(name="norm", positions=4, momentum=0.1),)
    work = Calibrate(settings=TrainingSettings(), calibration=Calibration(norms=norms))
    return _task(name, number, work, changes)


def deploy_task(name: str = "d1", run_id: str = "run") -> Task:
    models = tuple(
        TaskSubmodel(
            architecture=Architecture(name="w1/2 d1"),
            program=ProgramRef(program_id=target, target=target, blob=blob(f"model {target}")),
        )
        for target in ("onnx", "executorch")
    )
    return _task(name, 3, Deploy(), {"run_id": run_id, "planned_peak_bytes": 0}, models)


def score_task(name: str = "s1", number: int = 1, **changes: Any) -> Task:
    """Two candidates with the same program and different weights."""
    candidates = changes.pop("submodels", None) or tuple(
        TaskSubmodel(
            architecture=Architecture(name=architecture), program=PROGRAM, weights=blob(f"weights {name} {part}")
        )
        for architecture, part in (("w1/2 d1", "a"), ("w1 d1", "b"))
    )
    return _task(name, number, Score(settings=TrainingSettings()), changes, candidates)


def evaluate_task(name: str = "e1", number: int = 1, **changes: Any) -> Task:
    settings = EvaluationSettings(batch_size=8, per_class=True)
    return _task(name, number, Evaluate(settings=settings), changes)


@dataclass
class Agent:
    """The pure agent together with its state.

    Every reading returns `free_bytes` and `downlink_bps`; every check of the disk returns `room_bytes`.
    """

    settings: AgentSettings = field(default_factory=lambda: AgentSettings(profile=profile()))
    saved: Saved = field(default_factory=Saved)
    now_s: float = 0.0
    free_bytes: int = 2000
    room_bytes: int = 10**9
    downlink_bps: float | None = None
    state: AgentState = field(init=False)
    first: tuple[Action, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.state, self.first = start(self.settings, self.saved, self.now_s)

    def step(self, event: Event) -> tuple[Action, ...]:
        """Handle one event alone."""
        self.state, actions = step(self.settings, self.state, event, self.now_s)
        return actions

    def see(self, event: Event) -> tuple[Action, ...]:
        """Handle one event and the readings that it requests."""
        actions = list(self.step(event))
        for action in actions:
            if isinstance(action, Measure):
                actions += self.step(self.measured(action))
            elif isinstance(action, Weigh):
                actions += self.step(self.weighed(action))
        return tuple(actions)

    def weighed(self, weigh: Weigh) -> Weighed:
        lacking = frozenset(blob.sha256 for blob in weigh.task.blobs)
        return Weighed(task_id=weigh.task.task_id, lacking=lacking, room_bytes=self.room_bytes)

    def measured(self, measure: Measure) -> Measured:
        return Measured(
            measure=measure,
            log_time_s=log_time_of(measure),
            reading=Reading(memory_free_bytes=self.free_bytes, downlink_bps=self.downlink_bps),
            memory_budget_bytes=self.free_bytes // 2,
        )

    def step_heard(self, message: RoundInfo | Task | Ack) -> tuple[Action, ...]:
        """Handle a message without the readings that it requests."""
        return self.step(Received(message=message))

    def hear(self, message: RoundInfo | Task | Ack) -> tuple[Action, ...]:
        return self.see(Received(message=message))

    def fetch_all(self) -> tuple[Action, ...]:
        """Deliver every blob that the current task lacks."""
        actions: tuple[Action, ...] = ()
        for sha256 in sorted(self.state.current.lacking) if self.state.current is not None else ():
            actions += self.see(BlobArrived(sha256=sha256))
        return actions

    def train(self, task: Task) -> tuple[Action, ...]:
        """Handle everything from the announcement to the start of the worker."""
        actions = self.hear(announce(task.round, "train", task.run_id))
        return actions + self.hear(task) + self.fetch_all()

    def score(self, task: Task) -> tuple[Action, ...]:
        """Let the worker end with scores."""
        return self.step(ScoringEnded(task_id=task.task_id, scores=SCORES))

    def evaluate(self, task: Task) -> tuple[Action, ...]:
        """Let the worker end with an evaluation."""
        return self.step(EvaluationEnded(task_id=task.task_id, result=EVALUATION))

    def finish(self, task: Task) -> tuple[Action, ...]:
        return self.step(TrainingEnded(task_id=task.task_id, result=RESULT, blob=blob(f"update {task.task_id}")))


def log_time_of(measure: Measure) -> float | None:
    """The time at which a replayed log is read."""
    match measure:
        case MeasureForRound(info=info):
            return info.log_time_s
        case MeasureForTask(log_time_s=log_time_s):
            return log_time_s
    return None


def connected_agent(**changes: Any) -> Agent:
    agent = Agent(**changes)
    agent.see(LinkUp())
    return agent


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


def find_action(actions: tuple[Action, ...], kind: type) -> Any:
    """The only action of a kind."""
    (result,) = [action for action in actions if isinstance(action, kind)]
    return result
