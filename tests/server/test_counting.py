"""The round from which an exported program counts if rounds do not wait for it, and replayed runs."""

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.coordinator_cases import measuring, program_result
from server.server_rig import World, config, fleet
from server.test_export_queue import (
    RequestedPrograms,
    aggregate,
    assign_all,
    context_requesting,
    is_aggregating,
    train_all,
    write_queue,
)

from subfleet.export.requests import AnyRequest, EvaluateRequest, TrainRequest
from subfleet.methods.fedtrans import FedTrans
from subfleet.protocol.errors import ConfigError
from subfleet.rounds.coordinator import step
from subfleet.rounds.networks import NEVER, list_first_attempts
from subfleet.search.queue import SizedProgram
from subfleet.settings.run import Run
from subfleet.settings.run_folder import SUMMARY, read_description, read_replay, write_description
from subfleet.settings.sections import Evaluations
from subfleet.testing.rounds import with_steps

GROWING = FedTrans(first="configured", gamma=1, delta=1, beta=1e9, stop_rounds=0, noise=0.1)


def test_no_round_waits_where_the_method_lets_rounds_go_on() -> None:
    context = context_requesting(RequestedPrograms(ada=1))
    context = replace(context, roles=with_steps(context.roles, awaits_programs=False))
    state, actions = train_all(context, assign_all(context, measuring(context))[0])
    assert (state.phase, is_aggregating(actions), len(state.queue)) == ("aggregate", True, 1)


def test_replayed_rounds_assign_programs_from_the_same_rounds() -> None:
    """With one slow program and one that never came: a replay uses no program earlier, and waits for slow ones."""
    requested_programs = RequestedPrograms(ada=1, bob=2)
    context = context_requesting(requested_programs, rounds=4)
    context = replace(context, roles=with_steps(context.roles, awaits_programs=False))
    state, (slow, lost) = assign_all(context, measuring(context))
    assigned = []
    for number in (1, 2, 3):
        if number == 2:
            state, _ = step(context, state, program_result(state, slow, 1), 3.0)
        state, _ = aggregate(context, train_all(context, state)[0])
        state, _ = assign_all(context, state)
        assigned.append([client.size for client in state.clients.values()])
    smallest, larger = context.space[0], context.space[1]
    assert assigned == [[smallest] * 3, [larger, smallest, smallest], [larger, smallest, smallest]]
    attempts = list_first_attempts(context, state)
    first = SizedProgram(size=smallest, target="onnx").key
    assert attempts == {first: 2, slow.key: 3, lost.key: NEVER}

    again = replace(context, config=replace(context.config, programs_from=dict(attempts)))
    fast, _ = assign_all(again, measuring(again))
    fast = write_queue(again, fast)
    for number, expected in enumerate(assigned, start=1):
        fast, actions = train_all(again, fast)
        assert is_aggregating(actions), number
        fast, _ = assign_all(again, aggregate(again, fast)[0])
        assert [client.size for client in fast.clients.values()] == expected
    assert list_first_attempts(again, fast) == attempts

    late, _ = assign_all(again, measuring(again))
    late, actions = train_all(again, late)
    assert is_aggregating(actions), "the program was not available after the first round"
    late, _ = assign_all(again, aggregate(again, late)[0])
    late, actions = train_all(again, late)
    assert not is_aggregating(actions), "it was available after the second"
    late, actions = step(again, late, program_result(late, slow, 1), 3.5)
    assert is_aggregating(actions)
    late, _ = assign_all(again, aggregate(again, late)[0])
    assert [client.size for client in late.clients.values()] == assigned[1]


class Slow:
    """An exporter that completes the programs of grown networks some rounds after the request."""

    def __init__(self, world: World, rounds: int) -> None:
        self.world, self.rounds = world, rounds
        self.first = world.settings.model
        self.due: dict[str, int] = {}  # a restarted server requests them again
        self.pending: list[tuple[int, TrainRequest | EvaluateRequest, Future[Path]]] = []
        self.write = world.exports.submit
        world.exports.submit = self.submit  # type: ignore[method-assign]

    def submit(self, request: AnyRequest, **options: Any) -> "Future[Path]":
        if not isinstance(request, TrainRequest | EvaluateRequest) or request.model == self.first:
            return self.write(request, **options)
        future: Future[Path] = Future()
        due = self.due.setdefault(request.program_id, self.world.server.state.aggregated_round + self.rounds)
        self.pending.append((due, request, future))
        return future

    def turn(self) -> None:
        due = [entry for entry in self.pending if entry[0] <= self.world.server.state.aggregated_round]
        self.pending = [entry for entry in self.pending if entry not in due]
        for _, request, future in due:
            future.set_result(self.write(request).result())


def play_run(folder: Path, settings: Run, *, slow: int = 0, kills: int = 0) -> World:
    behaviours = fleet()
    for behaviour in behaviours.values():
        behaviour.held_out_count = 5
    world = World(folder, settings, behaviours)
    exports = Slow(world, slow)
    for turn in range(1, 6000):
        if world.server.finished:
            return world
        world.turn()
        exports.turn()
        if kills and turn % kills == 0:
            world.kill_server()
    raise AssertionError(f"the run hangs in {world.server.state.phase} of round {world.server.state.round}")


def summarise(world: World) -> Any:
    result = world.server.result()
    rounds = [[(row.client_id, row.architecture_id, row.status) for row in record.clients] for record in result.rounds]
    evaluations = [
        [(row.client_id, row.architecture_id, row.status) for row in record.clients] for record in result.evaluations
    ]
    return (
        world.model_bytes(),
        rounds,
        evaluations,
        dict(result.programs_from),
        [network.lineage for network in result.networks],
    )


@pytest.mark.slow
def test_a_run_with_slow_exports_is_replayed_to_the_same_bits(tmp_path: Path) -> None:
    settings = config(rounds=6, method=GROWING, evaluation=Evaluations(every=1))
    slow = play_run(tmp_path / "slow", settings, slow=2, kills=9)
    _, rounds, evaluations, attempts, lineages = expected = summarise(slow)
    assert len(lineages) > 2
    assert len({architecture_id for clients in rounds for _, architecture_id, _ in clients}) > 1
    assert len({architecture_id for clients in evaluations for _, architecture_id, _ in clients}) > 1
    assert {status for clients in evaluations for *_, status in clients} == {"evaluated"}, (
        "no client waited for an export"
    )
    fast = play_run(tmp_path / "fast", settings)
    assert summarise(fast)[1] != rounds, "the time of the exports matters"
    again = replace(settings, programs_from=attempts)
    assert summarise(play_run(tmp_path / "again", again)) == expected


def test_the_attempts_of_a_finished_run_are_read_from_its_folder(tmp_path: Path) -> None:
    run = config()
    write_description(tmp_path, run)
    with pytest.raises(ConfigError, match="is not finished; resume it with: subfleet runs resume"):
        read_replay(tmp_path)
    (tmp_path / SUMMARY).write_text(json.dumps({"programs_from": {"onnx/0": 4}}), encoding="utf-8")
    assert read_replay(tmp_path) == replace(read_description(tmp_path), programs_from={"onnx/0": 4})
    with pytest.raises(ValueError, match=r"programs_from\.onnx/0 is -1, but must be an attempt, or 0 for never"):
        replace(run, programs_from={"onnx/0": -1})
