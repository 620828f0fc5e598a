"""Programs that train two networks: counted as any other, and no word on what a size needs alone."""

from server.coordinator_cases import CLIENTS, measured, measuring, plan_of, prepared, update

from subfleet.protocol.topics import Topics
from subfleet.server.actions import Close
from subfleet.server.coordinator import step
from subfleet.server.events import Folded, UpdateStored
from subfleet.server.methods.fjord import FjORD
from subfleet.server.rounds import Plan, RunState
from subfleet.server.rows import round_record
from subfleet.server.seating import ask_of
from subfleet.server.traffic import Traffic


def played(plan: Plan, state: RunState) -> tuple[RunState, int]:
    """A round in which everybody trains; the programs that its record tells."""
    for name in CLIENTS:
        state, _ = step(plan, state, measured(plan, name, state.round), 2.0)
    for name in CLIENTS:
        state, _ = step(plan, state, prepared(plan, state, name), 3.0)
        state, _ = step(plan, state, UpdateStored(update=update(plan, state, name)), 3.0)
    event = Folded(round=state.round, accuracy=0.5, loss=1.0, sha256="0" * 64, refused={})
    state, actions = step(plan, state, event, 4.0)
    close = next(action for action in actions if isinstance(action, Close))
    return state, round_record(plan, close, Traffic(Topics())).programs_written


def test_each_pair_of_size_and_student_is_one_program_of_the_round_that_wrote_it() -> None:
    plan = plan_of(method=FjORD(), rounds=6)
    state, known = measuring(plan), set[tuple[str, str]]()
    for _ in range(5):
        state, written = played(plan, state)
        pairs = {
            (seat.size.spec_id, seat.student.spec_id)
            for seat in state.last.values()
            if seat.size is not None and seat.student is not None
        }
        assert written == len(pairs - known)
        known |= pairs
    assert len(known) > len({size for size, _ in known}), "or nothing is shown of students"
    seat = next(iter(state.last.values()))
    assert not ask_of(plan, state, seat).written, "what two networks need says nothing of one"
