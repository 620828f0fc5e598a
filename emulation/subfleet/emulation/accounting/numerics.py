"""Handles the requests of a run from cost estimates: nothing is exported, trained or aggregated."""

from collections.abc import Callable, Mapping, Set
from typing import Any

from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.update_form import list_frozen
from subfleet.emulation.accounting.programs import count_weight_bytes, estimate_program_bytes
from subfleet.export.requests import EstimateRequest
from subfleet.journal.base import RunJournal
from subfleet.programs.supply import build_train_request
from subfleet.programs.worker import Handler, Snapshot, Steps, wait_for
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.submodel import Architecture
from subfleet.rounds import signals, work
from subfleet.rounds.networks import get_network, list_lineages
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.state import RunState
from subfleet.search.queue import ProgramFacts, SizedProgram
from subfleet.serving.numerics import Means, decide


class AccountedNumerics:
    """See `Numerics`. There is no model: blobs have names and sizes, and plans are those of the planner's estimates.

    Args:
        means: what it works with.
    """

    def __init__(self, means: Means) -> None:
        self._means, self._context = means, means.context
        self._estimates: dict[tuple[str, str], MemoryEstimates] = {}
        self._programs: dict[str, tuple[ProgramRef, ProgramFacts]] = {}
        self._sizes: dict[tuple[str, bool], int] = {}  # of weights, by submodel

    @property
    def duties(self) -> Mapping[type, Handler]:
        """See `Numerics.duties`."""
        works: Mapping[type, Callable[[Any, Snapshot], Steps[Any]]] = {
            work.TaskRequest: self._prepare_task,
            work.ProgramRequest: self._write_program,
            work.CostRequest: self._estimate_costs,
            work.CheckRequest: self._check,
            signals.AggregationRequest: self._aggregate,
        }
        accounts = {kind: Handler(work=account, failure="it cannot be estimated") for kind, account in works.items()}
        return {**decide(self._means.threads, self._context), **accounts}

    @property
    def digests(self) -> Set[str]:
        """See `Numerics.digests`; no blob is stored."""
        return frozenset()

    def load(self, state: RunState, journal: RunJournal) -> ModelState:
        """See `Numerics.load`."""
        del state, journal
        return ModelState(shared={})

    def adopt(self) -> ModelState:
        """See `Numerics.adopt`."""
        return ModelState(shared={})

    async def _prepare_task(self, request: work.TaskRequest, run: Snapshot) -> work.PreparedTask:
        client = request.participant
        network = self._find_network(run.state, client.size)
        wanted = SizedProgram(size=client.size, target=request.target, student=request.student)
        program, facts = await self._describe_program(network, wanted, request.round)
        frozen = None
        if list_frozen(network):
            frozen = self._name_weights("frozen", network, client.architecture)
        weights = self._name_weights(f"{run.state.aggregated_round}", network, client.architecture)
        return work.PreparedTask(program=program, weights=weights, facts=facts, frozen=frozen)

    async def _write_program(self, request: work.ProgramRequest, run: Snapshot) -> ProgramFacts:
        network = self._find_network(run.state, request.program.size)
        return (await self._describe_program(network, request.program, request.round))[1]

    async def _estimate_costs(self, request: work.CostRequest, run: Snapshot) -> MemoryEstimates:
        del run
        return await self._estimate(self._context.get_declared(request.lineage).network, request.target)

    async def _check(self, request: work.CheckRequest, run: Snapshot) -> ChangeSize:
        del request, run
        return ChangeSize()

    async def _aggregate(self, request: signals.AggregationRequest, run: Snapshot) -> work.AggregatedRound:
        del run
        living = [lineage for lineage in list_lineages(self._context, request.lineages) if lineage.living]
        networks = [self._context.get_declared(lineage) for lineage in living]
        return work.AggregatedRound(
            accuracy=None,
            loss=None,
            sha256="",
            refused={},
            lineages=request.lineages,
            model_bytes=sum(each.estimate(each.network.full_architecture()).weight_bytes for each in networks),
        )

    async def _describe_program(
        self, network: Network, wanted: SizedProgram, round_number: int
    ) -> tuple[ProgramRef, ProgramFacts]:
        """A program as the planner's estimates have it. The memory of self-distillation's student is missing."""
        size, target, student = wanted.size, wanted.target, wanted.student
        training = self._context.training(round_number, student=student)
        program_id = build_train_request(network, size, target, training, student=student).program_id
        if program_id not in self._programs:
            estimates = await self._estimate(network, target)
            (planned_bytes,) = estimates.memory_bytes(network, [size])
            size_bytes = estimate_program_bytes(network, size, target)
            blob = BlobRef(sha256=BlobRef.of(program_id.encode()).sha256, size_bytes=size_bytes)
            facts = ProgramFacts(planned_peak_bytes=planned_bytes, program_bytes=size_bytes)
            self._programs[program_id] = ProgramRef(program_id=program_id, target=target, blob=blob), facts
        return self._programs[program_id]

    async def _estimate(self, network: Network, target: str) -> MemoryEstimates:
        key = (network.id, target)
        if key not in self._estimates:
            training = self._context.training(1)
            export = build_train_request(network, network.full_architecture(), target, training)
            file = await wait_for(self._means.exports.submit(EstimateRequest(training=export)))
            self._estimates[key] = MemoryEstimates.unpack(file.read_bytes())
        return self._estimates[key]

    def _name_weights(self, version: str, network: Network, architecture: Architecture) -> BlobRef:
        """Weights that nobody has: a device fetches those of each version once."""
        frozen, name = version == "frozen", architecture.architecture_id
        if (name, frozen) not in self._sizes:
            self._sizes[name, frozen] = count_weight_bytes(network, architecture, frozen=frozen)
        text = f"{version}/{network.id}/{name}"
        return BlobRef(sha256=BlobRef.of(text.encode()).sha256, size_bytes=self._sizes[name, frozen])

    def _find_network(self, state: RunState, size: Architecture) -> Network:
        return get_network(self._context, state.lineages, size).network
