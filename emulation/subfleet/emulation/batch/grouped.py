"""Clients of one submodel are trained together by PyTorch; where that is slower, one after the other.

Groups follow from the tasks that the server has sent, so a run repeats its bits. They are not those of a device's
runtime: sums are rounded in another order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from subfleet.arrays import Arrays, compute_change
from subfleet.edge_client.task_work import Outcome, finish_training
from subfleet.emulation.batch.grouped_steps import GroupStep, make_group_step
from subfleet.emulation.batch.work import WorkHere
from subfleet.export.requests import TrainRequest
from subfleet.protocol.errors import SubfleetError, TrainingError
from subfleet.protocol.jobs import Job, TrainResult
from subfleet.protocol.task import Task, Train
from subfleet.trainers.feeding import ProgramCall, Tally, check_settings, compute_constants, make_calls
from subfleet.trainers.job_context import read_data
from subfleet.trainers.job_files import read_weights, write_change
from subfleet.trainers.kept import Host

GROUP_BYTES = 2**30
"""The planned memory of the programs of clients that train together, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """A training that may be done with others.

    Attributes:
        job: what to train.
        program_id: of its program; jobs of one program train together.
        planned_bytes: the planned memory of the program.
    """

    job: Job[Train]
    program_id: str
    planned_bytes: int


class Groups:
    """Trains jobs, each with all others of the same program that are known by then.

    Args:
        trainings: requests of training programs, by program id.
        host: reads samples.
        device: computes.
        stopped: asked between steps; True ends the training.
    """

    def __init__(
        self, trainings: Mapping[str, TrainRequest], host: Host, device: torch.device, stopped: Callable[[], bool]
    ) -> None:
        self._trainings = trainings
        self._host = host
        self._device = device
        self._stopped = stopped
        self._steps: dict[str, GroupStep] = {}
        self._expected: dict[str, GroupJob] = {}  # by client
        self._trained: dict[str, tuple[Path, TrainResult | SubfleetError]] = {}  # by client

    def knows(self, program_id: str) -> bool:
        """Whether it can train a program."""
        return program_id in self._trainings

    def expect(self, known: GroupJob) -> None:
        """Note a job that may be asked for; it replaces an earlier one of its client, and what that gave."""
        client_id = known.job.client_id
        if client_id in self._trained:
            self._trained.pop(client_id)[0].unlink(missing_ok=True)
        self._expected[client_id] = known

    def train(self, wanted: GroupJob) -> TrainResult:
        """Train a job, unless it was trained with others; raises as `train_job`."""
        path, client_id = wanted.job.output_path, wanted.job.client_id
        if self._trained.get(client_id, (None,))[0] != path:
            self.expect(wanted)
            self._train_all([known for known in self._expected.values() if known.program_id == wanted.program_id])
        _, result = self._trained.pop(client_id)
        if isinstance(result, SubfleetError):
            raise result
        return result

    def _train_all(self, alike: Sequence[GroupJob]) -> None:
        program_id = alike[0].program_id
        if program_id not in self._steps:
            self._steps[program_id] = make_group_step(self._trainings[program_id], self._device)
        step = self._steps[program_id]
        most = max(1, GROUP_BYTES // max(alike[0].planned_bytes, 1)) if step.together else 1
        for start in range(0, len(alike), most):
            jobs = [known.job for known in alike[start : start + most]]
            with _compute_alone():
                results = _Group(step, self._host, self._device).train(jobs, self._stopped)
            for job, result in zip(jobs, results, strict=True):
                del self._expected[job.client_id]
                self._trained[job.client_id] = job.output_path, result


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWork:
    """Trains a client with others, and does its other tasks as its runtime does; see `ClientWork`.

    Attributes:
        here: does the other tasks.
        groups: of all clients.
    """

    here: WorkHere
    groups: Groups

    def expect(self, task: Task) -> None:
        """See `ClientWork.expect`."""
        with suppress(SubfleetError):  # said when it begins
            if (job := self._make_job(task)) is not None:
                self.groups.expect(job)

    def begin(self, task: Task, memory_limit_bytes: int) -> Callable[[], Outcome]:
        """See `ClientWork.begin`."""
        if not self._takes(task):
            return self.here.begin(task, memory_limit_bytes)
        return partial(self.here.work.guard, task, memory_limit_bytes, partial(self._train, task))

    def _takes(self, task: Task) -> bool:
        """Whether a task is a training of one path, of a program whose request is known."""
        work = task.work
        return isinstance(work, Train) and work.paths is None and self.groups.knows(task.programs[0].program_id)

    def _make_job(self, task: Task) -> GroupJob | None:
        if not isinstance(task.work, Train) or not self._takes(task):
            return None
        work, planned_bytes = self.here.work, task.planned_peak_bytes
        job = work.make_job(task, task.work, task.submodels[0], planned_bytes, work.data)
        return GroupJob(job=job, program_id=task.programs[0].program_id, planned_bytes=planned_bytes)

    def _train(self, task: Task) -> Outcome:
        job = self._make_job(task)
        if job is None:
            raise TrainingError(f"task {task.task_id!r:.80} is no training")
        return finish_training(task, self.groups.train(job), job.job.output_path)


@contextmanager
def _compute_alone() -> Iterator[None]:
    """A context without gradients, on one thread: the bits of sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """A job of a group, while it is trained."""

    job: Job[Train]
    sample_count: int
    calls: Iterator[ProgramCall]
    weights: Arrays
    constants: Arrays
    tally: Tally
    result: TrainResult | SubfleetError = field(default_factory=lambda: TrainingError("the training has not ended"))
    ended: bool = False

    def end(self, result: TrainResult | SubfleetError) -> None:
        """Set the result."""
        self.result, self.ended = result, True


class _Group:
    """Members that take their steps together. One that has taken its last, or has failed, leaves the others.

    Args:
        step: of their program.
        host: reads samples.
        device: computes.
    """

    def __init__(self, step: GroupStep, host: Host, device: torch.device) -> None:
        self._step = step
        self._layout = step.layout
        self._host = host
        self._device = device
        self._members: list[_Member] = []
        self._carried: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}

    def train(self, jobs: Sequence[Job[Train]], stopped: Callable[[], bool]) -> list[TrainResult | SubfleetError]:
        """Train all, and write their changes; returns the result or the problem of each."""
        opened = [self._open(job) for job in jobs]
        self._members = [member for member in opened if isinstance(member, _Member)]
        if self._members:
            self._hold()
        while self._members:
            self._take_step(stopped())
        return [one.result if isinstance(one, _Member) else one for one in opened]

    def _open(self, job: Job[Train]) -> _Member | SubfleetError:
        settings, layout = job.work.settings, self._layout
        try:
            check_settings(settings, layout)
            dataset = read_data(job, layout, self._host)
            weights = read_weights(job.tensor_paths, layout.weights)
            return _Member(
                job=job,
                sample_count=settings.round_count(len(dataset)),
                calls=make_calls(job, layout, dataset),
                weights=weights,
                constants=compute_constants(settings, layout, dataset, weights),
                tally=Tally(whole=settings.local_steps > 0),
            )
        except SubfleetError as error:
            return error

    def _hold(self) -> None:
        """Put the values that members keep from step to step side by side."""
        members, layout = self._members, self._layout
        self._constants = {
            name: self._stack([member.constants[name] for member in members]) for name in members[0].constants
        }
        self._carried = {
            value.name: self._stack([member.weights[value.tensor] for member in members]) for value in layout.stored
        }
        for value in layout.zeroed:
            self._carried[value.name] = torch.zeros((len(members), *value.shape), device=self._device)

    def _stack(self, arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(arrays)).to(self._device)

    def _take_step(self, is_stopped: bool) -> None:
        calls = [next(member.calls, None) for member in self._members]
        if is_stopped:
            error = TrainingError("training was stopped; its task must be started again")
            for member in self._members:
                member.end(error)
        for row, (member, call) in enumerate(zip(self._members, calls, strict=True)):
            if call is None and not member.ended:
                self._finish(member, row)
        self._keep([row for row, member in enumerate(self._members) if not member.ended])
        taken = [call for call in calls if call is not None]
        if not self._members:
            return
        fed = {name: self._stack([call.fed[name] for call in taken]) for name in taken[0].fed}
        outputs = self._step.run({**self._constants, **self._carried, **fed})
        self._carried = {name: outputs[result] for name, result in self._layout.carried.items()}
        self._count(taken, outputs)

    def _count(self, calls: Sequence[ProgramCall], outputs: Mapping[str, Tensor]) -> None:
        layout = self._layout
        names = filter(None, (layout.loss, layout.correct, layout.count, layout.squares))
        read = {name: outputs[name].cpu().numpy() for name in names}
        for row, (member, call) in enumerate(zip(self._members, calls, strict=True)):
            try:
                member.tally.take(call, {name: array[row] for name, array in read.items()}, layout)
            except SubfleetError as error:
                member.end(error)
        self._keep([row for row, member in enumerate(self._members) if not member.ended])

    def _keep(self, rows: Sequence[int]) -> None:
        """Go on with some of the members."""
        if len(rows) == len(self._members):
            return
        self._members = [self._members[row] for row in rows]
        chosen = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._carried = {name: value[chosen] for name, value in self._carried.items()}
        self._constants = {name: value[chosen] for name, value in self._constants.items()}

    def _finish(self, member: _Member, row: int) -> None:
        """Write the change of a member that has taken its last step."""
        try:
            member.tally.end(0.0)
            trained = {
                value.tensor: np.array(self._carried[value.name][row].cpu().numpy()) for value in self._layout.stored
            }
            changed = compute_change(trained, {name: member.weights[name] for name in trained}, in_place=True)
            write_change(member.job, changed, exact=self._layout.buffers)
            member.end(member.tally.result(sample_count=member.sample_count, measured_peak_bytes=0))
        except SubfleetError as error:
            member.end(error)
