"""The server of a run: the loop that owns the state and performs the actions of the coordinator.

Every step decides (pure), writes the journal, then acts. What a client is promised is on disk before the promise is
sent, and a server that is killed in between makes the same promise again.
"""

import gc
import threading
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

from subfleet.aggregation.checkpoint import prune_checkpoints
from subfleet.aggregation.evaluation_data import read_evaluation_data
from subfleet.elastic.model_state import ModelState
from subfleet.journal.base import RunJournal
from subfleet.journal.database import reporting_damage
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.journal import open_journal
from subfleet.journal.networks import GenerationRecord, describe_generation
from subfleet.journal.places import Places
from subfleet.journal.records import RunObserver, RunResult
from subfleet.journal.rows import build_record
from subfleet.link.base import Connect
from subfleet.programs.supply import Exports
from subfleet.programs.worker import Snapshot, Threads, Worker
from subfleet.protocol.errors import FileError, RunError
from subfleet.rounds import signals
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.buffering import list_postponed_updates
from subfleet.rounds.closing import resume_state
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.searching import find_searched_round
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest
from subfleet.serving.attendance import Attendance
from subfleet.serving.loading import build_result
from subfleet.serving.narration import Pace, describe_step
from subfleet.serving.numerics import Means, ModelNumerics, Numerics
from subfleet.serving.run_context import create_context
from subfleet.settings.run import Run
from subfleet.tasks import Dataset
from subfleet.tasks.measuring import measure_inputs
from subfleet.transport.blob_store import BlobStore

_POLL_S = 0.05


class Server:
    """Runs a run to its end, or resumes the run in its state folder.

    It is used by one thread. Work that takes longer than milliseconds is done by a `Worker` in other threads.

    Args:
        config: settings of the run.
        connect: creates the link to the devices.
        observer: of the run; its errors do not affect the run.
        state_folder: used by one server at a time.
        exports: the exporter; it is not closed.
        samples: evaluation data; None reads those of the settings.
        clock: monotonic seconds.
        journal: opens the journal of a run in a folder.
        numerics: creates what handles requests.

    Attributes:
        context: of the run.
        samples: evaluation data without validation samples.
        blobs: what devices fetch, and their updates.
        state: the current state; only the server sets it.
        model: the current model; only the server sets it.

    Raises:
        ConfigError: the run was begun with other settings, or the settings of the model are invalid.
        DataError: the evaluation data cannot be used.
        FileError: the state folder cannot be used.
    """

    def __init__(  # noqa: PLR0913 - the parts of a server
        self,
        config: Run,
        connect: Connect,
        observer: RunObserver,
        *,
        state_folder: Path,
        exports: Exports,
        samples: Dataset | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Callable[[Path, Run], RunJournal] = open_journal,
        numerics: Callable[[Means], Numerics] = ModelNumerics,
    ) -> None:
        config, evaluation, validation = read_evaluation_data(config, samples)
        self.samples = evaluation
        self._observer = GuardedObserver(observer)
        self._clock = clock
        self._pace = Pace(config.total_rounds, time.monotonic)
        self._places = Places(state_folder)
        self._places.make()
        self._journal = journal(state_folder, config)
        run_id = self._journal.run_id
        self.context = replace(create_context(config, run_id), evaluation_inputs=measure_inputs(evaluation))
        self._attendance = Attendance(self.context, self._journal)
        self.blobs = blobs = BlobStore(self._places.blobs)
        self._link = connect(blobs)
        means = Means(
            context=self.context,
            places=self._places,
            blobs=blobs,
            threads=Threads(),
            exports=exports,
            evaluation=evaluation,
            validation=validation,
        )
        self._numerics = numerics(means)
        self._work = Worker(self._numerics.duties, means.threads)
        self.state = RunState()
        self._goes_on = False
        self._littered = False
        self.model = ModelState(shared={})

    @property
    def finished(self) -> bool:
        """Whether the run has ended; clients may not know yet."""
        return self.state.phase in ("finished", "failed")

    @property
    def busy(self) -> bool:
        """Whether the next step has something to do without any message or time."""
        return self._goes_on or self._work.more

    @property
    def working(self) -> bool:
        """Whether requests are open, whose end `finish` waits for."""
        return bool(self._work.requests)

    def run(self, stop: threading.Event) -> RunResult:
        """Run to the end, or until `stop` is set.

        Raises:
            RunError: the run has failed.
            TransportError: the broker is unreachable at the start.
            FileError: the state folder cannot be used, or is used by another server.
        """
        with self._places.lock():
            self.open()
            freeze_loaded_objects()
            try:
                while not stop.is_set() and not self.finished:
                    self.step(_POLL_S)
                self._linger(stop)
            finally:
                self.close()
        if self.state.phase == "failed":
            raise RunError(self.state.failure)
        return self.result()

    def open(self) -> None:
        """Load the stored state and connect. Raises FileError if the journal is damaged."""
        now_s = self._clock()
        with reporting_damage(self._places.folder):
            stored = self._journal.load(now_s)
            self.state = state = resume_state(self.context, stored)
            actions = list_resume_actions(self.context, state)
            self._link.traffic.restart(self._journal.load_bytes(state))
            self._renew()
            self._journal.save(stored, state)
            self._sweep()
        self._link.open()
        if state.round > 0:
            self._observer.say(f"run {self.context.run_id} is resumed in round {state.round}, phase {state.phase}")
        for action in actions:
            self._perform(action)

    def step(self, timeout_s: float) -> None:
        """Handle events for up to `timeout_s` seconds, and send what is due."""
        # First, so that the results of work from this step are always handled in the next one, and a run with a logical
        # clock takes the same steps on every machine.
        for outcome in self._work.events():
            if isinstance(outcome, signals.RequestFailed) and outcome.by_disk:
                raise FileError(outcome.reason)
            self._apply(outcome)
        at_once, self._goes_on = self.busy, False
        if messages := tuple(self._link.receive(0.0 if at_once else timeout_s)):
            self._apply(signals.Messages(messages=messages))
        for update in self._link.pull_updates():
            self._begin(CheckRequest(update=update))
        self._apply(signals.Tick())
        # Not before all events have been applied: one of them may be about an update that counts in the next round.
        if self._littered:
            self._tidy()
        now_s = self._clock()
        for text in self._attendance.check(self.state, now_s):
            self._observer.say(text)
        self._link.send(build_round_info(self.context, self.state, now_s))

    def finish(self, *, exports: bool = True) -> None:
        """Wait for all work in other threads, which takes no time of a logical clock."""
        self._work.finish(exports=exports)

    def close(self) -> None:
        """Disconnect and end the threads. The run can be resumed."""
        self._link.close()
        self._work.close()
        self._journal.close()

    def result(self) -> RunResult:
        """The result of the run so far. Raises FileError if the journal is damaged."""
        with reporting_damage(self._places.folder):
            return build_result(self.context, self.state, self._journal, self._places.checkpoints)

    def _renew(self) -> None:
        """Load the model of the current state."""
        self.model = self._numerics.load(self.state, self._journal)

    def _linger(self, stop: threading.Event) -> None:
        """Announce the end until all clients have left, up to the configured time."""
        until_s = self._clock() + self.context.config.deadlines.linger_s
        while not stop.is_set() and self._clock() < until_s:
            self.step(_POLL_S)
            if all(member.heard_s is None for member in self.state.live.members.values()):
                break

    def _apply(self, event: signals.Event) -> None:
        """Decide, write the journal, act."""
        before = self.state
        after, actions = step(self.context, before, event, self._clock())
        closes = (action for action in actions if isinstance(action, signals.AnyClose))
        close = next(closes, None)
        record = None if close is None else build_record(self.context, close, self._link.traffic)
        self._journal.save(before, after, counted=self._link.traffic.of, close=close, record=record)
        self.state = after
        if after.aggregated_round != before.aggregated_round:
            self.model = self._numerics.adopt()
        elif after.lineages != before.lineages:  # other networks begin the run, or a search has found some
            self._renew()
        self._link.traffic.follow(before, after)
        for action in actions:
            self._perform(action)
        if isinstance(record, EvaluationRecord):
            self._observer.evaluated(record)
        elif isinstance(record, GenerationRecord):
            self._observer.say(describe_generation(record))
        elif record is not None:
            self._observer.round_finished(record)
            self._littered = True
        for text in describe_step(self.context, before, after):
            self._observer.say(text)
        if (progress := self._pace.progress(after, self._attendance.list_awaited(after))) is not None:
            self._observer.progressed(progress)

    def _perform(self, action: signals.Action) -> None:
        match action:
            case signals.GoOn():
                self._goes_on = True
            case signals.SendTask():
                self._link.send_task(action.task)
            case signals.Ask():
                self._link.ask(action.client_id, action.info)
            case signals.Withdraw():
                self._link.withdraw(action.task_id)
            case signals.Reply():
                self._link.reply(action.client_id, action.ack)
            case CheckRequest():
                self._link.pull(action.update)  # it is checked once its blob has arrived
            case signals.Close() | signals.CloseEvaluation() | signals.CloseGeneration():
                pass  # its record is written together with the state
            case _:
                self._begin(action)

    def _begin(self, request: signals.Request) -> None:
        self._work.begin(request, Snapshot(state=self.state, model=self.model))

    def _sweep(self) -> None:
        """Remove files of a killed server, but not partial uploads of open tasks, which devices continue."""
        self._tidy(self.blobs.partials if self.state.phase == "train" else set())

    def _tidy(self, needed: Set[str] = frozenset()) -> None:
        """Remove files that no round and no open task needs any more, except blobs with the `needed` digests."""
        self._littered = False
        keep_from = self.state.aggregated_round - self.context.config.keep_rounds + 1
        prune_checkpoints(
            self._places.checkpoints, keep_from=keep_from, rounds=[find_searched_round(self.context, self.state)]
        )
        stored = self._journal.update_digests(since_round=keep_from)
        requests = self._work.requests
        checked = {request.update.blob.sha256 for request in requests if isinstance(request, CheckRequest)}
        tasks = [client.task for client in self.state.clients.values() if client.open and client.task is not None]
        served = {blob.sha256 for task in tasks for blob in task.blobs}
        waiting = {update.blob.sha256 for update in list_postponed_updates(self.state)}
        self.blobs.prune(self._numerics.digests | self._link.digests | checked | stored | served | waiting | needed)


def freeze_loaded_objects() -> None:
    """Exclude everything that is loaded from garbage collection.

    PyTorch alone has hundreds of thousands of objects, and each full collection would stop the loop for a tenth of a
    second.
    """
    gc.freeze()
