"""The server of one run: the loop that owns the state, and performs what the coordinator asks for.

Order of every step: decide (pure), write the journal, then act. What a client was promised is therefore on disk before
the promise leaves, and a server that dies between the two makes the same promise again.
"""

import logging
import threading
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

import torch

from subfleet.elastic.model_state import ModelState
from subfleet.export.quantisation.report import samples_of
from subfleet.folding.checking import Checks
from subfleet.folding.checkpoint import prune_checkpoints
from subfleet.folding.devices import compute_device
from subfleet.folding.evaluation_data import with_evaluation
from subfleet.folding.folding import Folding
from subfleet.folding.views import Views
from subfleet.folding.workbench import Workbench
from subfleet.journal.database import open_database
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.generations import GenerationRecord, generation_text
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.journal import Journal, begin_run
from subfleet.journal.places import Places
from subfleet.journal.reading import understood
from subfleet.journal.records import RunObserver, RunResult
from subfleet.journal.rows import record_of
from subfleet.link.announcing import Announcer
from subfleet.link.inbox import Incoming, read_delivery
from subfleet.link.traffic import Traffic
from subfleet.link.uploads import Uploads
from subfleet.programs.supply import Exports, Supply
from subfleet.protocol.blobs import Chunk
from subfleet.protocol.errors import RunError
from subfleet.protocol.messages import BlobMissing, ChunkRequest, Receipt, encode
from subfleet.protocol.topics import Topics
from subfleet.rounds.actions import (
    Action,
    Close,
    CloseEvaluation,
    CloseGeneration,
    Fetch,
    Fold,
    GoOn,
    Reply,
    Request,
    SendTask,
    Withdraw,
)
from subfleet.rounds.coordinator import resume_actions, round_info, step
from subfleet.rounds.ending import taken_up
from subfleet.rounds.events import Event, Tick
from subfleet.rounds.exhaustive import never
from subfleet.rounds.requests import BeginningWanted, GenerationWanted, SearchWanted
from subfleet.rounds.searching import searched_round
from subfleet.rounds.state import RunState
from subfleet.serving.attendance import Attendance
from subfleet.serving.garbage import freeze_what_is_loaded
from subfleet.serving.loading import loaded_model
from subfleet.serving.lookout import Lookout
from subfleet.serving.narrating import told
from subfleet.serving.pace import Pace
from subfleet.serving.standing import standing_result
from subfleet.serving.terms import terms_of
from subfleet.settings.run import Run
from subfleet.tasks.measuring import statistics_of
from subfleet.transport.base import Connected, Delivery, Disconnected, Transport
from subfleet.transport.blob_store import BlobStore
from subfleet.transport.chunk_sizes import ChunkSizes
from subfleet.transport.complaints import Complaints
from subfleet.transport.counting import CountingTransport
from subfleet.transport.exchange import BlobExchange, Fetched, FetchFailed
from subfleet.transport.outbox import Outbox

__all__ = ["Server"]

_LOG = logging.getLogger(__name__)
_POLL_S = 0.05
_EVENTS_PER_STEP = 256


class Server:
    """Runs one configured run to its end, or takes up where an earlier server on the same state folder stopped.

    Everything belongs to the thread that calls it; the exporter and the folding work beside it and are polled.

    Args:
        config: of the run.
        transport: the link to the broker, not opened yet.
        observer: told of every finished round; it may fail, and the run goes on.
        state_folder: where the run lives; one server at a time.
        exports: the exporter. The caller closes it.
        sizes: of the chunks that come through the broker.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, evaluation, validation = with_evaluation(config)
        self._config = config
        self._device = compute_device(config.device)
        self._observer = GuardedObserver(observer)
        self._clock = clock
        self._pace = Pace(config.total_rounds, time.monotonic)
        self._topics = Topics(config.fleet.name)
        self._places = Places(state_folder)
        self._places.make()
        engine = open_database(state_folder)
        run_id = begin_run(engine, name=config.name, settings=config.fingerprint(), round_count=config.total_rounds)
        self._engine = engine
        self._terms = replace(terms_of(config, run_id), evaluation_inputs=statistics_of(evaluation))
        self._journal = Journal(engine, run_id, first_memory=self._terms.policies.memory)
        self._attendance = Attendance(self._terms, engine)
        self._traffic = Traffic(self._topics)
        self._transport = CountingTransport(transport, on_payload=self._traffic.count)
        self._blobs = BlobStore(self._places.blobs)
        self._complaints = Complaints(_LOG, clock)
        self._exchange = BlobExchange(
            self._blobs,
            complain=self._complaints.note,
            request_topic=lambda peer: self._topics.down(peer, "request"),
            chunk_topic=lambda peer: self._topics.down(peer, "chunk"),
            missing_topic=lambda peer: self._topics.down(peer, "missing"),
            sizes=sizes,
        )
        self._uploads = Uploads(self._exchange, self._complaints.note)
        self._outbox = Outbox()
        self._announcer = Announcer()
        views = Views(terms=self._terms, samples=torch.from_numpy(evaluation.inputs.copy()))
        self._supply = Supply(
            self._terms,
            views,
            exports,
            blobs=self._blobs,
            models_folder=self._places.models / run_id,
            samples_sha256=samples_of(evaluation).sha256 if config.deploy_quantisation != "none" else "",
        )
        folding, checkpoints = Folding(terms=self._terms, blobs=self._blobs), self._places.checkpoints
        self._checks = Checks(self._terms, self._blobs)
        self._lookout = Lookout(self._terms, validation)
        self._workbench = Workbench(folding, views, evaluation, checkpoints=checkpoints)
        self._state = RunState()
        self._goes_on = False
        self._model = self._folded = ModelState(shared={})

    @property
    def run_id(self) -> str:
        """The run's name and a part of its own."""
        return self._terms.run_id

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
        with understood(self._places.folder):
            stored = self._journal.load(now_s)
            self._state = state = taken_up(self._terms, stored)
            actions = resume_actions(self._terms, state)
            self._traffic.restart(self._journal.load_bytes(state))
            self._renew()
            self._journal.save(stored, state)
            self._sweep()
        self._transport.open((self._topics.up("+", "+"),))
        if state.round > 0:
            self._observer.say(f"run {self.run_id} is taken up in round {state.round}, phase {state.phase}")
        for action in actions:
            self._perform(action)

    def step(self, timeout_s: float) -> None:
        """Handle what has come within `timeout_s` seconds, and send what is due."""
        self._take_outcomes()
        at_once, self._goes_on = self._goes_on or self._supply.more, False
        event = self._transport.poll(0.0 if at_once else timeout_s)
        for _ in range(_EVENTS_PER_STEP):
            if event is None:
                break
            self._take(event)
            event = self._transport.poll(0.0)
        if event is not None:
            self._take(event)
        for result in self._exchange.finished():
            self._take_transfer(result)
        self._apply(Tick())
        for text in self._attendance.look(self._state, self._clock()):
            self._observer.say(text)
        self._send()
        self._complaints.tick()

    def _take_outcomes(self) -> None:
        """Handle what was done beside the loop, before anything else.

        So what begins in this step is looked at in the next one, however fast it is, and a run under a logical clock
        takes the same steps on every machine.
        """
        outcome = self._workbench.outcome()
        for event in (*self._checks.events(), *self._supply.events(), *self._lookout.events()):
            self._apply(event)
        if outcome is not None:
            self._folded = outcome.model or self._folded
            self._apply(outcome.event)

    def finish(self) -> None:
        """Wait until what goes on beside this loop has ended: under a logical clock it takes no time."""
        self._checks.finish()
        self._lookout.finish()
        self._workbench.finish()

    def close(self) -> None:
        """Disconnect and let the threads end. The run can be taken up again."""
        self._transport.close()
        self._checks.close()
        self._lookout.close()
        self._workbench.close()
        self._engine.dispose()

    def result(self) -> RunResult:
        """How the run stands, or ended; a damaged journal is a FileError."""
        with understood(self._places.folder):
            return standing_result(self._terms, self._state, self._journal, self._places.checkpoints)

    def _renew(self) -> None:
        """Take up the model that the state stands at."""
        model = loaded_model(self._terms, self._state, self._journal, self._places.checkpoints)
        self._model = model.on(self._device)
        self._supply.renew(self._model)

    def _linger(self, stop: threading.Event) -> None:
        """Tell of the end until everyone has left, at most for the configured time."""
        until_s = self._clock() + self._config.deadlines.linger_s
        while not stop.is_set() and self._clock() < until_s:
            self.step(_POLL_S)
            if all(member.heard_s is None for member in self._state.live.members.values()):
                break

    def _take(self, event: Connected | Disconnected | Delivery) -> None:
        if isinstance(event, Connected):
            self._exchange.reconnected(event.message_bytes)
            self._outbox.resend_all()
            self._announcer.again()
        elif isinstance(event, Disconnected):
            _LOG.warning("the link to the broker is down: %s", event.reason)
        elif (read := read_delivery(self._topics, event, self._complaints.note)) is not None:
            self._take_message(*read)

    def _take_message(self, client_id: str, incoming: Incoming) -> None:
        match incoming:
            case Receipt():
                self._settle(client_id, incoming)
            case ChunkRequest():
                self._exchange.handle_request(client_id, incoming)
            case Chunk():
                self._exchange.handle_chunk(client_id, incoming)
            case BlobMissing():
                self._exchange.handle_missing(client_id, incoming)
            case _:
                self._apply(incoming)

    def _settle(self, client_id: str, receipt: Receipt) -> None:
        """A device acknowledges its own task; the ids of others' tasks are no secret."""
        seat = self._state.seats.get(client_id)
        if seat is not None and seat.task is not None and seat.task.message_id == receipt.of:
            self._outbox.settle(receipt.of)

    def _take_transfer(self, result: Fetched | FetchFailed) -> None:
        for update in self._uploads.ended(result):
            self._checks.begin(update, self._state.seats.get(update.client_id), self._model)

    def _apply(self, event: Event) -> None:
        """Decide, write down, act."""
        before = self._state
        after, actions = step(self._terms, before, event, self._clock())
        close = next((one for one in actions if isinstance(one, Close | CloseEvaluation | CloseGeneration)), None)
        record = None if close is None else record_of(self._terms, close, self._traffic)
        self._journal.save(before, after, counted=self._traffic.of, close=close, record=record)
        self._state = after
        if after.folded_round != before.folded_round:
            self._model = self._folded
            self._supply.renew(self._model)
        elif after.lineages != before.lineages:  # other networks begin the run, or a search has found some
            self._renew()
        self._traffic.follow(before, after)
        for action in actions:
            self._perform(action)
        if isinstance(record, EvaluationRecord):
            self._observer.evaluated(record)
        elif isinstance(record, GenerationRecord):
            self._observer.say(generation_text(record))
        elif record is not None:
            self._observer.round_finished(record)
            self._tidy()
        for text in told(self._terms, before, after):
            self._observer.say(text)
        if (progress := self._pace.progress(after, self._attendance.awaited(after))) is not None:
            self._observer.progressed(progress)

    def _perform(self, action: Action) -> None:
        match action:
            case Request():
                self._request(action)
            case GoOn():
                self._goes_on = True
            case SendTask():
                topic = self._topics.down(action.task.client_id, "task")
                self._outbox.put(action.task.message_id, topic, encode(action.task), retain=True)
            case Withdraw():
                self._outbox.settle(action.task_id)
                self._uploads.drop(action.task_id)
            case Reply():
                self._transport.publish(self._topics.down(action.client_id, "receipt"), encode(action.receipt))
            case Fetch():
                self._uploads.pull(action.update)
            case Fold():
                self._workbench.begin(action, self._model, self._state)
            case Close() | CloseEvaluation() | CloseGeneration():
                pass  # its record is written with the state that it closes
            case _:
                never(action)

    def _request(self, action: Request) -> None:
        if isinstance(action.wanted, SearchWanted | BeginningWanted | GenerationWanted):
            self._lookout.begin(action.wanted, self._state, self._model)
        else:
            self._supply.begin(action.wanted)

    def _send(self) -> None:
        now_s = self._clock()
        for outgoing in (*self._exchange.tick(now_s), *self._outbox.due(now_s)):
            self._transport.publish(outgoing.topic, outgoing.payload, retain=outgoing.retain)
        if (info := round_info(self._terms, self._state, now_s)) is not None and self._announcer.due(info, now_s):
            self._transport.publish(self._topics.all("round"), encode(info), retain=True)

    def _sweep(self) -> None:
        """Remove what a server that died has left; in a round with open tasks, devices go on with their uploads."""
        tasks = [seat.task for seat in self._state.seats.values() if seat.open and seat.task is not None]
        served = {blob.sha256 for task in tasks for blob in task.blobs}
        self._tidy(served | (self._blobs.partials if self._state.phase == "train" else set()))

    def _tidy(self, needed: Set[str] = frozenset()) -> None:
        """Remove what no round needs any more, but for the blobs of some digests."""
        keep_from = self._state.folded_round - self._config.keep_rounds + 1
        prune_checkpoints(
            self._places.checkpoints, keep_from=keep_from, kept=[searched_round(self._terms, self._state)]
        )
        stored = self._journal.update_digests(since_round=keep_from)
        self._blobs.prune(self._supply.digests | self._uploads.digests | self._checks.digests | stored | needed)
