"""An aggregation that fails once is repeated: no client is left out, and the model has the same bits as without
the failure."""

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


def move_towards(sign: float) -> Callable[[Any, Any], dict[str, Any]]:
    """Train towards a model of the device's own, so that devices diverge."""

    def change(weights: Any, task: Any) -> dict[str, Any]:
        return {name: (0.5 * (sign - array)).astype(np.float32) for name, array in sorted(weights.items())}

    return change


def world(folder: Path, method: AnyMethod) -> World:
    devices = {name: replace(behaviour, change=move_towards(TOWARDS[name])) for name, behaviour in fleet().items()}
    return World(folder, config(rounds=6, method=method, deploy_targets=()), devices)


class Failing:
    """Runs a function, and raises an error after the first of every `every` calls."""

    def __init__(self, inner: Callable[..., Any], error: Exception, *, every: int) -> None:
        self._inner = inner
        self._error = error
        self._every = every
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self._inner(*arguments, **options)
        self.calls += 1
        if self.calls % self._every == 1:
            raise self._error
        return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    mostly_long([HeteroFL(), FedAdam(), GROWING, SPLITTING], FedAdam(), GROWING),
    ids=lambda method: method.TYPE,
)
def test_a_repeated_aggregation_has_the_bits_of_a_single_one(
    method: AnyMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt at each round fails after its last step, when networks have grown, retired and been scored."""
    once = world(tmp_path / "once", method)
    once.run()
    failing = Failing(save_checkpoint, MemoryError(), every=2)
    monkeypatch.setattr("subfleet.aggregation.round_aggregator.save_checkpoint", failing)
    twice = world(tmp_path / "twice", method)
    twice.run()
    assert failing.calls == 2 * 6
    results = [played.server.result() for played in (once, twice)]
    assert once.model_bytes() == twice.model_bytes()
    assert results[0].networks == results[1].networks
    assert once.server.state.memory == twice.server.state.memory
    assert {row.status for record in results[1].rounds for row in record.clients} == {"aggregated"}
    evaluated = [[(record.accuracy, record.loss) for record in result.rounds] for result in results]
    assert evaluated[0] == evaluated[1]
    if method in (GROWING, SPLITTING):
        assert len(results[0].networks) > 1, "new networks appear"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", mostly_long([HeteroFL(), GROWING, SPLITTING], GROWING), ids=lambda method: method.TYPE
)
def test_an_aggregation_leaves_the_model_that_it_begins_with_unchanged(
    method: AnyMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregates = 0

    def watch(context: Any, blobs: Any, state: Any, request: Any, *rest: Any) -> AggregatedModel:
        nonlocal aggregates
        held = [tensor for name in state.network_ids for tensor in state.of(name).shared.values()]
        before = [tensor.numpy().tobytes() for tensor in held]
        result = aggregate_model(context, blobs, state, request, *rest)
        assert [tensor.numpy().tobytes() for tensor in held] == before
        aggregates += 1
        return result

    monkeypatch.setattr("subfleet.aggregation.round_aggregator.aggregate_model", watch)
    world(tmp_path, method).run()
    assert aggregates == 6


@pytest.mark.slow
def test_a_full_disk_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second attempt cannot succeed, and no client is at fault."""
    failing = Failing(save_checkpoint, FileError("no space is left on the disk"), every=2)
    monkeypatch.setattr("subfleet.aggregation.round_aggregator.save_checkpoint", failing)
    with pytest.raises(FileError, match="no space is left"):
        world(tmp_path, HeteroFL()).run()
    assert failing.calls == 1


@pytest.mark.slow
def test_a_failure_in_both_attempts_leaves_out_a_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def aggregate_two(context: Any, blobs: Any, state: Any, request: Any, *rest: Any) -> AggregatedModel:
        calls.append(request.round)
        if request.round == 1 and len(request.clients) == 3:
            raise MemoryError
        return aggregate_model(context, blobs, state, request, *rest)

    monkeypatch.setattr("subfleet.aggregation.round_aggregator.aggregate_model", aggregate_two)
    played = world(tmp_path, HeteroFL())
    played.run()
    assert calls[:4] == [1, 1, 1, 2], "two attempts with all three, one with two of them"
    (refused,) = [row for row in played.server.result().rounds[0].clients if row.status != "aggregated"]
    assert refused.status.startswith("refused: aggregation failed: MemoryError")
