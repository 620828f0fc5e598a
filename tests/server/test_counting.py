"""From which round a written program counts, where rounds do not wait for it, and runs that are played again."""

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.coordinator_cases import measuring, program_result
from server.server_rig import World, config, fleet
from server.test_export_queue import RequestedPrograms, aggregated, asked, is_aggregating, trained, wishing, written

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
    context = wishing(RequestedPrograms(ada=1))
    context = replace(context, roles=with_steps(context.roles, awaits_programs=False))
    state, actions = trained(context, asked(context, measuring(context))[0])
    assert (state.phase, is_aggregating(actions), len(state.queue)) == ("aggregate", True, 1)


def test_rounds_that_are_played_again_give_programs_when_they_were_given() -> None:
    """A program that was slow at first and one that never came: fast ones are not given earlier, slow ones awaited."""
    requested_programs = RequestedPrograms(ada=1, bob=2)
    context = wishing(requested_programs, rounds=4)
    context = replace(context, roles=with_steps(context.roles, awaits_programs=False))
    state, (slow, lost) = asked(context, measuring(context))
    given = []
    for number in (1, 2, 3):
        if number == 2:
            state, _ = step(context, state, program_result(state, slow, 1), 3.0)
        state, _ = aggregated(context, trained(context, state)[0])
        state, _ = asked(context, state)
        given.append([client.size for client in state.clients.values()])
    smallest, wanted = context.space[0], context.space[1]
    assert given == [[smallest] * 3, [wanted, smallest, smallest], [wanted, smallest, smallest]]
    attempts = list_first_attempts(context, state)
    first = SizedProgram(size=smallest, target="onnx").key
    assert attempts == {first: 2, slow.key: 3, lost.key: NEVER}

    again = replace(context, config=replace(context.config, programs_from=dict(attempts)))
    fast, _ = asked(again, measuring(again))
    fast = written(again, fast)
    for number, expected in enumerate(given, start=1):
        fast, actions = trained(again, fast)
        assert is_aggregating(actions), number
        fast, _ = asked(again, aggregated(again, fast)[0])
        assert [client.size for client in fast.clients.values()] == expected
    assert list_first_attempts(again, fast) == attempts

    late, _ = asked(again, measuring(again))
    late, actions = trained(again, late)
    assert is_aggregating(actions), "the program was not there after the first round"
    late, _ = asked(again, aggregated(again, late)[0])
    late, actions = trained(again, late)
    assert not is_aggregating(actions), "it was after the second"
    late, actions = step(again, late, program_result(late, slow, 1), 3.5)
    assert is_aggregating(actions)
    late, _ = asked(again, aggregated(again, late)[0])
    assert [client.size for client in late.clients.values()] == given[1]


class Slow:
    """An exporter whose programs of networks that grew are there some rounds after they were asked for."""

    def __init__(self, world: World, rounds: int) -> None:
        self.world, self.rounds = world, rounds
        self.first = world.settings.model
        self.due: dict[str, int] = {}  # a killed server asks again
        self.pending: list[tuple[int, TrainRequest | EvaluateRequest, Future[Path]]] = []
        self.write = world.exports.submit
        world.exports.submit = self.submit  # type: ignore[method-assign]

    def submit(self, request: AnyRequest, **named: Any) -> "Future[Path]":
        if not isinstance(request, TrainRequest | EvaluateRequest) or request.model == self.first:
            return self.write(request, **named)
        future: Future[Path] = Future()
        due = self.due.setdefault(request.program_id, self.world.server.state.aggregated_round + self.rounds)
        self.pending.append((due, request, future))
        return future

    def turn(self) -> None:
        due = [one for one in self.pending if one[0] <= self.world.server.state.aggregated_round]
        self.pending = [one for one in self.pending if one not in due]
        for _, request, future in due:
            future.set_result(self.write(request).result())


def played(folder: Path, settings: Run, *, slow: int = 0, kills: int = 0) -> World:
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


def outcome(world: World) -> Any:
    found = world.server.result()
    rounds = [[(row.client_id, row.architecture_id, row.status) for row in record.clients] for record in found.rounds]
    evaluations = [
        [(row.client_id, row.architecture_id, row.status) for row in record.clients] for record in found.evaluations
    ]
    return world.model_bytes(), rounds, evaluations, dict(found.programs_from), [one.lineage for one in found.networks]


@pytest.mark.slow
def test_a_run_whose_networks_were_slow_to_write_is_played_again_to_the_same_bits(tmp_path: Path) -> None:
    settings = config(rounds=6, method=GROWING, evaluation=Evaluations(every=1))
    slow = played(tmp_path / "slow", settings, slow=2, kills=9)
    _, rounds, evaluations, attempts, lineages = expected = outcome(slow)
    assert len(lineages) > 2
    assert len({architecture_id for clients in rounds for _, architecture_id, _ in clients}) > 1
    assert len({architecture_id for clients in evaluations for _, architecture_id, _ in clients}) > 1
    assert {status for clients in evaluations for *_, status in clients} == {"evaluated"}, "nobody waited for an export"
    fast = played(tmp_path / "fast", settings)
    assert outcome(fast)[1] != rounds, "when they are written matters"
    again = replace(settings, programs_from=attempts)
    assert outcome(played(tmp_path / "again", again)) == expected


def test_the_turns_of_a_run_that_is_over_are_read_from_its_folder(tmp_path: Path) -> None:
    run = config()
    write_description(tmp_path, run)
    with pytest.raises(ConfigError, match="is not over; go on with it with: subfleet runs resume"):
        read_replay(tmp_path)
    (tmp_path / SUMMARY).write_text(json.dumps({"programs_from": {"onnx/0": 4}}), encoding="utf-8")
    assert read_replay(tmp_path) == replace(read_description(tmp_path), programs_from={"onnx/0": 4})
    with pytest.raises(ValueError, match=r"programs_from\.onnx/0 is -1, but must be an attempt, or 0 for never"):
        replace(run, programs_from={"onnx/0": -1})
