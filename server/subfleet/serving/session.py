"""The server of one run: the loop that owns the state, and performs what the coordinator asks for.

Order of every step: decide (pure), write the journal, then act. What a client was promised is therefore on disk before
the promise leaves, and a server that dies between the two makes the same promise again.
"""

import threading
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

import torch

from subfleet.aggregation.checking import Checker
from subfleet.aggregation.checkpoint import prune_checkpoints
from subfleet.aggregation.devices import compute_device
from subfleet.aggregation.evaluation_data import read_evaluation_data
from subfleet.aggregation.round_aggregator import RoundAggregator
from subfleet.aggregation.views import Views
from subfleet.elastic.model_state import ModelState
from subfleet.export.quantisation.models import samples_of
from subfleet.journal.database import open_database, reporting_damage
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.generations import GenerationRecord, describe_generation
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.journal import Journal, begin_run
from subfleet.journal.places import Places
from subfleet.journal.records import RunObserver, RunResult
from subfleet.journal.rows import build_record
from subfleet.link.device_link import DeviceLink
from subfleet.programs.supply import Exports, Supply
from subfleet.programs.worker import Snapshot, Threads, Worker
from subfleet.protocol.errors import FileError, RunError
from subfleet.rounds.context import RunContext
from subfleet.rounds.continuing import resume_state
from subfleet.rounds.coordinator import build_round_info, list_resume_actions, step
from subfleet.rounds.searching import find_searched_round
from subfleet.rounds.signals import (
    Action,
    Close,
    CloseEvaluation,
    CloseGeneration,
    Event,
    GoOn,
    Reply,
    Request,
    RequestFailed,
    SendTask,
    Tick,
    Withdraw,
)
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest
from subfleet.serving.context import context_of
from subfleet.serving.duties import duties_of
from subfleet.serving.garbage import freeze_what_is_loaded
from subfleet.serving.loading import loaded_model, standing_result
from subfleet.serving.narrating import Attendance, Pace, told
from subfleet.settings.run import Run
from subfleet.tasks import Dataset
from subfleet.tasks.measuring import measure_inputs
from subfleet.transport.base import Transport
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.chunk_sizes import ChunkSizes

__all__ = ["Server"]

_POLL_S = 0.05


class Server:
    """Runs one configured run to its end, or takes up where an earlier server on the same state folder stopped.

    Everything belongs to the thread that calls it; a `Worker` does beside it whatever takes longer than milliseconds.

    Args:
        config: of the run.
        transport: the link to the broker, not opened yet.
        observer: told of every finished round; it may fail, and the run goes on.
        state_folder: where the run lives; one server at a time.
        exports: the exporter. The caller closes it.
        sizes: of the chunks that come through the broker.
        samples: the evaluation data; None reads those that the configuration names.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the run was begun with another configuration, or the model's description is wrong.
        DataError: the evaluation data cannot be used.
        FileError: the state folder cannot be used.
    """

    def __init__(  # noqa: PLR0913 - what a server is made of
        self,
        config: Run,
        transport: Transport,
        observer: RunObserver,
        *,
        state_folder: Path,
        exports: Exports,
        sizes: ChunkSizes | None = None,
        samples: Dataset | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, evaluation, validation = read_evaluation_data(config, samples)
        self._samples = evaluation
        self._config = config
        self._device = compute_device(config.device)
        self._observer = GuardedObserver(observer)
        self._clock = clock
        self._pace = Pace(config.total_rounds, time.monotonic)
        self._places = Places(state_folder)
        self._places.make()
        self._engine = open_database(state_folder)
        run_id = begin_run(
            self._engine, name=config.name, settings=config.fingerprint(), round_count=config.total_rounds
        )
        self._context = replace(context_of(config, run_id), evaluation_inputs=measure_inputs(evaluation))
        self._journal = Journal(self._engine, run_id, first_memory=self._context.roles.memory.initial)
        self._attendance = Attendance(self._context, self._journal)
        self._blobs = blobs = BlobStore(self._places.blobs)
        self._link = DeviceLink(config.fleet.name, transport, blobs, sizes=sizes, clock=clock)
        views, threads = Views(context=self._context, samples=torch.from_numpy(evaluation.inputs.copy())), Threads()
        self._supply = Supply(
            views,
            exports,
            threads,
            blobs=blobs,
            models_folder=self._places.models / run_id,
            samples_sha256=samples_of(evaluation).sha256 if config.deploy_quantisation != "none" else "",
        )
        self._aggregator = RoundAggregator(views, blobs, evaluation, checkpoints=self._places.checkpoints)
        duties = duties_of(self._context, threads, self._aggregator, Checker(self._context, blobs), validation)
        self._work = Worker({**self._supply.duties, **duties}, threads)
        self._state = RunState()
        self._goes_on = False
        self._model = ModelState(shared={})

    @property
    def run_id(self) -> str:
        """The run's name and a part of its own."""
        return self._context.run_id

    @property
    def context(self) -> RunContext:
        """What does not change in the run."""
        return self._context

    @property
    def samples(self) -> Dataset:
        """The evaluation data, without those for validation."""
        return self._samples

    @property
    def model(self) -> ModelState:
        """The model that the state stands at."""
        return self._model

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        return self._state

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do but to tell everyone."""
        return self._state.phase in ("finished", "failed")

    def run(self, stop: threading.Event) -> RunResult:
        """Run to the end, or until `stop` is set.

        Raises:
            RunError: the run cannot go on; the text says why.
            TransportError: the broker cannot be reached at the start.
            FileError: the state folder cannot be used, or another server uses it.
        """
        with self._places.locked():
            self.open()
            freeze_what_is_loaded()
            try:
                while not stop.is_set() and not self.finished:
                    self.step(_POLL_S)
                self._linger(stop)
            finally:
                self.close()
        if self._state.phase == "failed":
            raise RunError(self._state.failure)
        return self.result()

    def open(self) -> None:
        """Take up the stored state and connect; a damaged journal is a FileError."""
        now_s = self._clock()
        with reporting_damage(self._places.folder):
            stored = self._journal.load(now_s)
            self._state = state = resume_state(self._context, stored)
            actions = list_resume_actions(self._context, state)
            self._link.traffic.restart(self._journal.load_bytes(state))
            self._renew()
            self._journal.save(stored, state)
            self._sweep()
        self._link.open()
        if state.round > 0:
            self._observer.say(f"run {self.run_id} is taken up in round {state.round}, phase {state.phase}")
        for action in actions:
            self._perform(action)

    def step(self, timeout_s: float) -> None:
        """Handle what has come within `timeout_s` seconds, and send what is due."""
        # Before anything else: so what begins in this step is looked at in the next one, however fast it is, and a run
        # under a logical clock takes the same steps on every machine.
        for outcome in self._work.events():
            if isinstance(outcome, RequestFailed) and outcome.by_disk:
                raise FileError(outcome.reason)
            self._apply(outcome)
        at_once, self._goes_on = self._goes_on or self._work.more, False
        for event in self._link.receive(0.0 if at_once else timeout_s):
            self._apply(event)
        for update in self._link.pulled():
            self._begin(CheckRequest(update=update))
        self._apply(Tick())
        now_s = self._clock()
        for text in self._attendance.look(self._state, now_s):
            self._observer.say(text)
        self._link.send(build_round_info(self._context, self._state, now_s))

    def finish(self, *, exports: bool = True) -> None:
        """Wait until what goes on beside this loop has ended: under a logical clock it takes no time."""
        self._work.finish(exports=exports)

    def close(self) -> None:
        """Disconnect and let the threads end. The run can be taken up again."""
        self._link.close()
        self._work.close()
        self._engine.dispose()

    def result(self) -> RunResult:
        """How the run stands, or ended; a damaged journal is a FileError."""
        with reporting_damage(self._places.folder):
            return standing_result(self._context, self._state, self._journal, self._places.checkpoints)

    def _renew(self) -> None:
        """Take up the model that the state stands at."""
        model = loaded_model(self._context, self._state, self._journal, self._places.checkpoints)
        self._model = model.to(self._device)
        self._supply.renew(self._model)

    def _linger(self, stop: threading.Event) -> None:
        """Tell of the end until everyone has left, at most for the configured time."""
        until_s = self._clock() + self._config.deadlines.linger_s
        while not stop.is_set() and self._clock() < until_s:
            self.step(_POLL_S)
            if all(member.heard_s is None for member in self._state.live.members.values()):
                break

    def _apply(self, event: Event) -> None:
        """Decide, write down, act."""
        before = self._state
        after, actions = step(self._context, before, event, self._clock())
        close = next((one for one in actions if isinstance(one, Close | CloseEvaluation | CloseGeneration)), None)
        record = None if close is None else build_record(self._context, close, self._link.traffic)
        self._journal.save(before, after, counted=self._link.traffic.of, close=close, record=record)
        self._state = after
        if after.aggregated_round != before.aggregated_round:
            self._model = self._aggregator.model
            self._supply.renew(self._model)
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
            self._tidy()
        for text in told(self._context, before, after):
            self._observer.say(text)
        if (progress := self._pace.progress(after, self._attendance.awaited(after))) is not None:
            self._observer.progressed(progress)

    def _perform(self, action: Action) -> None:
        match action:
            case GoOn():
                self._goes_on = True
            case SendTask():
                self._link.send_task(action.task)
            case Withdraw():
                self._link.withdraw(action.task_id)
            case Reply():
                self._link.reply(action.client_id, action.ack)
            case CheckRequest():
                self._link.pull(action.update)  # and is checked when its blob is here
            case Close() | CloseEvaluation() | CloseGeneration():
                pass  # its record is written with the state that it closes
            case _:
                self._begin(action)

    def _begin(self, request: Request) -> None:
        self._work.begin(request, Snapshot(state=self._state, model=self._model))

    def _sweep(self) -> None:
        """Remove what a server that died has left; in a round with open tasks, devices go on with their uploads."""
        tasks = [client.task for client in self._state.clients.values() if client.open and client.task is not None]
        served = {blob.sha256 for task in tasks for blob in task.blobs}
        self._tidy(served | (self._blobs.partials if self._state.phase == "train" else set()))

    def _tidy(self, needed: Set[str] = frozenset()) -> None:
        """Remove what no round needs any more, but for the blobs of some digests."""
        keep_from = self._state.aggregated_round - self._config.keep_rounds + 1
        prune_checkpoints(
            self._places.checkpoints, keep_from=keep_from, kept=[find_searched_round(self._context, self._state)]
        )
        stored = self._journal.update_digests(since_round=keep_from)
        checked = {one.update.blob.sha256 for one in self._work.requests if isinstance(one, CheckRequest)}
        self._blobs.prune(self._supply.digests | self._link.digests | checked | stored | needed)
