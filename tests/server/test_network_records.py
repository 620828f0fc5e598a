"""What a run reports of its networks, from its rounds and the programs that were written."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import context_of
from server.test_costs import ROW, record

from subfleet.elastic.growing import deepen_cell, widen_cells
from subfleet.elastic.lineage import Copied, Lineage, Replicated
from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow
from subfleet.journal.networks import NetworkRecord, walk_descendants
from subfleet.journal.records import RoundRecord
from subfleet.journal.rows import build_network_records
from subfleet.rounds.state import RunState
from subfleet.search.queue import ProgramFacts, SizedProgram, WrittenProgram
from subfleet.serving.narration import describe_readiness

CONTEXT = context_of()
CONFIG = CONTEXT.config.model
CELLS = CONTEXT.network.cells
WIDE = widen_cells(CONFIG, [CELLS[0].name], 2.0)
FIRST = Lineage(id="", config=CONFIG)
WIDER = Lineage(id="m1", config=WIDE, parent="", map=Replicated(), born_round=1, reason="it learned no more")
DEEPER = Lineage(id="m2", config=deepen_cell(WIDE, CELLS[1]), parent="m1", map=Replicated(), born_round=2)


def program(
    lineage: Lineage, run_attempt: int, *, target: str = "onnx", peak_bytes: int | None = 1000
) -> WrittenProgram:
    size = CONTEXT.get_declared(lineage).space[-1]
    return WrittenProgram(
        program=SizedProgram(size=size, target=target),
        facts=ProgramFacts(planned_peak_bytes=peak_bytes),
        run_attempt=run_attempt,
    )


def state_of(
    *programs: WrittenProgram, lineages: tuple[Lineage, ...] = (FIRST, WIDER, DEEPER), run_attempt: int = 0
) -> RunState:
    return RunState(
        round=run_attempt,
        lineages=lineages,
        written=MappingProxyType({written.program.key: written for written in programs}),
    )


def play_rounds(*networks: Sequence[str], failed_attempts: Sequence[int] = ()) -> tuple[RoundRecord, ...]:
    """A round for each sequence of networks, with which clients c0, c1, ... were aggregated."""
    rounds = []
    for number, names in enumerate(networks, start=1):
        rows = [replace(ROW, client_id=f"c{index}", network=name) for index, name in enumerate(names)]
        rounds.append(record(number, 1.0, *rows))
    return tuple(
        replace(closed, failed_attempts=count)
        for closed, count in zip(rounds, failed_attempts or [0] * len(rounds), strict=True)
    )


def test_networks_are_recorded_with_their_clients_and_training_cost() -> None:
    rounds = play_rounds(["", ""], ["", "m1", "m1"], ["", "m1"])
    left_out = replace(ROW, client_id="c9", network="m1", status="refused: far from the others")
    rounds = (*rounds[:2], replace(rounds[2], clients=(*rounds[2].clients, left_out)))
    first, wider, deeper = build_network_records(CONTEXT, state_of(), rounds, ())
    assert first.trained == {1: ("c0", "c1"), 2: ("c0",), 3: ("c0",)}
    assert wider.trained == {2: ("c1", "c2"), 3: ("c1",)}
    assert (first.clients, wider.clients, deeper.clients) == (("c0", "c1"), ("c1", "c2"), ())
    assert wider.training_macs == 4 * ROW.training_macs, "a training with a refused update costs as much"
    assert (first.wider, first.deeper, first.list_changes()) == ((), (), [])
    longer = {*CELLS[0].axes}
    assert wider.wider == tuple(cell.name for cell in CELLS if longer & {*cell.axes})
    assert (deeper.wider, deeper.deeper, deeper.list_changes()) == ((), (CELLS[1].name,), [f"{CELLS[1].name} deeper"])
    estimate = CONTEXT.get_declared(DEEPER).candidates[-1]
    assert (deeper.parameters, deeper.forward_macs) == (estimate.parameters, estimate.forward_macs)
    assert first.forward_macs < wider.forward_macs < deeper.forward_macs


@pytest.mark.parametrize(
    ("programs", "failed_attempts", "trained", "expected"),
    [
        ((), (0, 0, 0, 0), None, None),
        ((program(WIDER, 1),), (0, 0, 0, 0), None, 2),
        ((program(WIDER, 2), program(WIDER, 3, target="executorch")), (0, 0, 0, 0), None, 3),
        ((program(WIDER, 4),), (0, 0, 0, 0), None, None),  # in the last round, which is over
        # The second round was tried twice before, so that its attempt is the fourth.
        ((program(WIDER, 3),), (0, 2, 0, 0), None, 2),
        ((program(WIDER, 4),), (0, 2, 0, 0), None, 3),
        ((program(WIDER, 2, peak_bytes=None),), (0, 0, 0, 0), None, None),
        ((), (0, 0, 0, 0), 3, 3),  # as is known of a network that has retired
        ((program(WIDER, 3),), (0, 0, 0, 0), 3, 3),  # nothing else was written: its clients have waited for it
    ],
)
def test_a_network_is_ready_in_the_round_after_its_program_was_written(
    programs: tuple[WrittenProgram, ...], failed_attempts: Sequence[int], trained: int | None, expected: int | None
) -> None:
    rounds = play_rounds(
        *(["m1" if number == trained else ""] for number in range(1, 5)), failed_attempts=failed_attempts
    )
    _, wider, _ = build_network_records(CONTEXT, state_of(*programs), rounds, ())
    assert wider.ready_round == expected


def test_accuracy_is_the_mean_over_the_clients_of_a_network() -> None:
    rows = [
        EvaluationRow(
            client_id=name,
            device="pi",
            architecture="",
            architecture_id="",
            loss=1.0,
            accuracy=accuracy,
            network=network,
        )
        for name, network, accuracy in (("a", "", 0.2), ("b", "m1", 0.5), ("c", "m1", 0.9))
    ]
    missing = replace(rows[2], client_id="d", accuracy=0.0, status="missing: no answer came in time")
    last = EvaluationRecord(round=2, seconds=1.0, clients=(*rows, missing))
    earlier = replace(last, round=1, clients=(replace(rows[0], accuracy=1.0),))
    first, wider, deeper = build_network_records(CONTEXT, state_of(), (), (earlier, last))
    assert (first.own_mean, first.owners) == (0.2, ("a",))
    assert wider.own_mean == pytest.approx(0.7)
    assert wider.owners == ("b", "c")
    assert (deeper.own_mean, deeper.owners) == (None, ())


def test_a_run_with_one_network_has_one_record() -> None:
    (only,) = build_network_records(CONTEXT, RunState(), play_rounds([""], [""]), ())
    assert (only.lineage, only.name, len(only.trained)) == (FIRST, "the first", 2)


@given(st.lists(st.integers(-1, 30), max_size=12))
def test_every_network_is_listed_once_after_its_parent(parents: list[int]) -> None:
    networks = [
        NetworkRecord(
            lineage=Lineage(id=f"m{index}", config=CONFIG)
            if parent < 0 or not index
            else Lineage(id=f"m{index}", config=CONFIG, parent=f"m{parent % index}", map=Copied())
        )
        for index, parent in enumerate(parents)
    ]
    descendants = list(walk_descendants(networks))
    assert sorted(network.name for _, network in descendants) == sorted(network.name for network in networks)
    seen = dict[str, int]()
    for depth, network in descendants:
        assert depth == (0 if network.lineage.parent is None else seen[network.lineage.parent] + 1)
        seen[network.name] = depth


def test_people_are_told_when_a_network_may_be_trained() -> None:
    nothing = state_of(program(FIRST, 1), run_attempt=2)
    unwritable = state_of(program(FIRST, 1), program(WIDER, 2, peak_bytes=None), run_attempt=2)
    ready = state_of(program(FIRST, 1), program(WIDER, 2), run_attempt=2)
    more = state_of(*ready.written.values(), program(WIDER, 3, target="executorch"), run_attempt=3)
    assert not list(describe_readiness(CONTEXT, nothing, unwritable))
    assert tuple(describe_readiness(CONTEXT, nothing, ready)) == ("network m1 may be trained from the next round on",)
    assert tuple(describe_readiness(CONTEXT, ready, more)) == ()
    assert tuple(describe_readiness(CONTEXT, RunState(), state_of(program(FIRST, 1), lineages=(), run_attempt=1))) == ()


def test_a_replayed_run_has_the_same_records() -> None:
    """A program that is written earlier than before is used no sooner."""
    early = program(WIDER, 2)
    again = replace(CONTEXT, config=replace(CONTEXT.config, programs_from={early.program.key: 4}))
    state = state_of(early, run_attempt=2)
    assert tuple(describe_readiness(again, state_of(run_attempt=2), state)) == ()
    messages = ("network m1 may be trained from the next round on",)
    assert tuple(describe_readiness(again, state, replace(state, round=3))) == messages
    assert tuple(describe_readiness(again, replace(state, round=3), replace(state, round=4))) == ()
    rounds = play_rounds(*[[""]] * 5)
    assert build_network_records(again, state, rounds, ())[1].ready_round == 4
    never = replace(CONTEXT, config=replace(CONTEXT.config, programs_from={early.program.key: 0}))
    assert build_network_records(never, state, rounds, ())[1].ready_round is None
