"""Programs that train two networks: counted as any other, no evidence of what one size needs, and never required."""

from pathlib import Path

import pytest
from server.coordinator_cases import CLIENTS, context_of, measuring, prepared, telemetry, update
from server.server_rig import World, config, fleet

from subfleet.export.requests import TrainRequest
from subfleet.journal.rows import build_round_record
from subfleet.link.traffic import Traffic
from subfleet.methods.fjord import FjORD
from subfleet.rounds.assigning import build_question
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import AggregationRequest, Close, RequestDone
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest


def play_round(context: RunContext, state: RunState) -> tuple[RunState, int]:
    """A round in which all clients train, and the number of programs in its record."""
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name, state.round), 2.0)
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), 3.0)
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            3.0,
        )
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    state, actions = step(context, state, event, 4.0)
    close = next(action for action in actions if isinstance(action, Close))
    return state, build_round_record(context, close, Traffic()).programs_written


def test_each_pair_of_size_and_student_is_one_program_of_the_round_that_wrote_it() -> None:
    context = context_of(method=FjORD(), rounds=6)
    state, known = measuring(context), set[tuple[str, str]]()
    for _ in range(5):
        state, written = play_round(context, state)
        pairs = {
            (
                client.size.architecture_id,
                "" if client.given is None or client.given.student is None else client.given.student.architecture_id,
            )
            for client in state.last.values()
            if client.size is not None
        }
        assert written == len(pairs - known)
        known |= pairs
    assert len(known) > len({size for size, _ in known}), "otherwise the test shows nothing of students"
    client = next(iter(state.last.values()))
    alone = {size for size, student in known if not student}
    assert build_question(context, state, client).written.keys() == alone, (
        "the needs of two networks are no evidence for one"
    )
    assert 0 < len(alone) < len(known)


@pytest.mark.slow
def test_a_device_with_memory_for_the_smallest_network_alone_takes_part_in_every_round(tmp_path: Path) -> None:
    """Two copies of the smallest network took 8.51 MB instead of 6.14 MB, so that small devices were skipped."""
    smallest = context_of(method=FjORD()).first.candidates[0].training_memory_bytes["onnx"]

    def planned(request: TrainRequest) -> int:
        return smallest if request.student is None else smallest + 1

    behaviours = fleet(memory_budget_bytes=lambda _: smallest)
    settings = config(method=FjORD(), rounds=6, deploy_targets=())
    world = World(tmp_path, settings, behaviours, planned=planned)
    world.run()
    rows = [row for record in world.server.result().rounds for row in record.clients]
    assert [row.status for row in rows] == ["aggregated"] * 6 * len(behaviours)
    assert world.server.result().method_status == "a width is drawn per client and round, not per batch"
