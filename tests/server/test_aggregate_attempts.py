"""An aggregation that fails for a moment is done again: nobody is left out, and the model has the bits of an
aggregation done once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrices import mostly_long
from server.server_rig import World, config, fleet

from subfleet.aggregation.aggregation import AggregatedModel, aggregate_model
from subfleet.aggregation.checkpoint import save_checkpoint
from subfleet.methods import AnyMethod
from subfleet.methods.adaptive import FedAdam
from subfleet.methods.fedtrans import FedTrans
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.sattler import Sattler
from subfleet.protocol.errors import FileError

GROWING = FedTrans(beta=1e6, gamma=1, delta=1, stop_rounds=0, noise=0.1)
SPLITTING = Sattler(warmup_rounds=1, mean_norm=2.0, max_norm=2.0, least_clients=2, least_half=1)
TOWARDS = {"ada": 1.0, "bob": -1.0, "cyd": 1.0}


def towards(sign: float) -> Callable[[Any, Any], dict[str, Any]]:
    """A device that is drawn to a model of its own, so that it parts from others."""

    def change(weights: Any, task: Any) -> dict[str, Any]:
        return {name: (0.5 * (sign - array)).astype(np.float32) for name, array in sorted(weights.items())}

    return change


def world(folder: Path, method: AnyMethod) -> World:
    devices = {name: replace(one, change=towards(TOWARDS[name])) for name, one in fleet().items()}
    return World(folder, config(rounds=6, method=method, deploy_targets=()), devices)


class Failing:
    """What runs, and then fails in the first of each so many calls: all that it did is done again."""

    def __init__(self, inner: Callable[..., Any], error: Exception, *, every: int) -> None:
        self._inner = inner
        self._error = error
        self._every = every
        self.calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        found = self._inner(*arguments, **named)
        self.calls += 1
        if self.calls % self._every == 1:
            raise self._error
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", mostly_long([HeteroFL(), FedAdam(), GROWING, SPLITTING], FedAdam(), GROWING), ids=lambda one: one.TYPE
)
def test_a_aggregate_done_twice_has_the_bits_of_one_done_once(
    method: AnyMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt at each round fails behind its last step, when networks have grown, retired and been judged."""
    once = world(tmp_path / "once", method)
    once.run()
    failing = Failing(save_checkpoint, MemoryError(), every=2)
    monkeypatch.setattr("subfleet.aggregation.round_aggregator.save_checkpoint", failing)
    twice = world(tmp_path / "twice", method)
    twice.run()
    assert failing.calls == 2 * 6
    results = [one.server.result() for one in (once, twice)]
    assert once.model_bytes() == twice.model_bytes()
    assert results[0].networks == results[1].networks
    assert once.server.state.memory == twice.server.state.memory
    assert {row.status for one in results[1].rounds for row in one.clients} == {"aggregated"}
    evaluated = [[(one.accuracy, one.loss) for one in result.rounds] for result in results]
    assert evaluated[0] == evaluated[1]
    if method in (GROWING, SPLITTING):
        assert len(results[0].networks) > 1, "networks appear in it"


@pytest.mark.slow
@pytest.mark.parametrize("method", mostly_long([HeteroFL(), GROWING, SPLITTING], GROWING), ids=lambda one: one.TYPE)
def test_a_aggregate_moves_nothing_of_the_model_that_it_begins_with(
    method: AnyMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregates = 0

    def watched(context: Any, blobs: Any, state: Any, request: Any) -> AggregatedModel:
        nonlocal aggregates
        held = [tensor for name in state.network_ids for tensor in state.of(name).shared.values()]
        before = [tensor.numpy().tobytes() for tensor in held]
        found = aggregate_model(context, blobs, state, request)
        assert [tensor.numpy().tobytes() for tensor in held] == before
        aggregates += 1
        return found

    monkeypatch.setattr("subfleet.aggregation.round_aggregator.aggregate_model", watched)
    world(tmp_path, method).run()
    assert aggregates == 6


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other attempt finds room on it, and it is no client's doing."""
    failing = Failing(save_checkpoint, FileError("no space is left on the disk"), every=2)
    monkeypatch.setattr("subfleet.aggregation.round_aggregator.save_checkpoint", failing)
    with pytest.raises(FileError, match="no space is left"):
        world(tmp_path, HeteroFL()).run()
    assert failing.calls == 1


@pytest.mark.slow
def test_what_fails_in_both_attempts_leaves_out_a_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def stumbles(context: Any, blobs: Any, state: Any, request: Any) -> AggregatedModel:
        calls.append(request.round)
        if request.round == 1 and len(request.clients) == 3:
            raise MemoryError
        return aggregate_model(context, blobs, state, request)

    monkeypatch.setattr("subfleet.aggregation.round_aggregator.aggregate_model", stumbles)
    played = world(tmp_path, HeteroFL())
    played.run()
    assert calls[:4] == [1, 1, 1, 2], "two attempts with all three, one with two of them"
    (refused,) = [row for row in played.server.result().rounds[0].clients if row.status != "aggregated"]
    assert refused.status.startswith("refused: aggregation failed: MemoryError")
