import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server.aggregating import aggregate_clients
from server.coordinator_cases import context_of, training, update
from server.coordinator_cases import scaled as at_scale
from server.fake_device import small_change
from torch import Tensor

from subfleet.aggregation.aggregation import AggregatedModel
from subfleet.aggregation.checkpoint import checkpoint_path, load_checkpoint, save_checkpoint
from subfleet.aggregation.updates import Magnitude, check_update, encode_submodel
from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.grid import largest_change
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.robust_aggregation import CoordinateMedian
from subfleet.elastic.server_optimisers import SERVER_OPTIMISERS, AnyServerOptimiser, ServerMomentum
from subfleet.elastic.update_form import UpdateForm
from subfleet.methods import Method
from subfleet.methods.adaptive import FedAdam, FedYogi
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.fedfa import FedFA
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.standalone import Standalone
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.update_codecs import Uncompressed
from subfleet.rounds.context import RunContext
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.state import AcceptedUpdate, ClientState
from subfleet.testing.rounds import with_steps
from subfleet.transport.blob_store import BlobStore

PLAN = context_of()
NETWORK = network_of(PLAN.config.model)
STATE = init_state(NETWORK, 0)
WHOLE = UpdateForm.of(NETWORK, NETWORK.full_architecture(), Uncompressed())
MAGNITUDES = {name: Magnitude(largest_change=largest_change(name, tensor)) for name, tensor in STATE.items()}


def aggregate(
    method: Method, clients: list[ClientState], blobs: BlobStore, *, max_client_fraction: float = 1.0, **changes: Any
) -> AggregatedModel:
    """Aggregate the updates of a round into the first model, by default with the weights of the method."""
    roles = with_steps(method.roles(), **changes)
    context = replace(PLAN, roles=roles, config=replace(PLAN.config, max_client_fraction=max_client_fraction))
    return aggregate_clients(context, blobs, ModelState(shared=STATE), 1, clients)


def _clients(
    blobs: BlobStore,
    samples: dict[str, int],
    context: RunContext = PLAN,
    model: Mapping[str, Tensor] = STATE,
    number: int = 1,
) -> list[ClientState]:
    """Every client trained the whole network; its change depends on its name."""
    state, clients = training(context), []
    for name, count in samples.items():
        client = state.clients[name]
        assert client.task is not None
        weights = decode_arrays(encode_submodel(context.network, client.task.architecture, model))
        ref = blobs.add(encode_arrays(small_change(weights, name, number, 0.1)))
        clients.append(
            replace(
                client,
                stage="done",
                offer=replace(client.offer, sample_count=count),
                trained=AcceptedUpdate(update=replace(update(context, state, name), blob=ref, sample_count=count)),
            )
        )
    return clients


def test_all_full_clients_equal_fedavg(tmp_path: Path) -> None:
    blobs, samples = BlobStore(tmp_path), {"ada": 3, "bob": 10, "cyd": 7}
    aggregated = aggregate(FedAvg(), _clients(blobs, samples), blobs).state.shared
    full = {name: tensor.numpy() for name, tensor in STATE.items()}
    changes = {name: small_change(full, name, 1, 0.1) for name in samples}
    for name, old in full.items():
        mean = sum(count * changes[client][name].astype(np.float64) for client, count in samples.items()) / 20
        np.testing.assert_allclose(aggregated[name].numpy(), old + mean, rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimiser"),
    [(FedAdam(), None), (FedYogi(), None), *((FedAvg(), kind()) for kind in SERVER_OPTIMISERS.values())],
    ids=lambda kind: kind.TYPE if kind is not None else "own",
)
def test_running_statistics_take_the_plain_mean_whatever_the_server_does_with_weights(
    tmp_path: Path, method: Method, optimiser: AnyServerOptimiser | None
) -> None:
    context = context_of(model=replace(PLAN.config.model, norm="batch"))
    tensors = context.network.tensors
    model = ModelState(shared=init_state(context.network, 0))
    blobs, samples = BlobStore(tmp_path), {"ada": 3, "bob": 10, "cyd": 7}
    statistics = {name for name in tensors if name.rpartition(".")[2] in ("running_mean", "running_var")}
    assert len(statistics) >= 2
    for number in (1, 2, 3):  # momentum shows in the second round
        clients = _clients(blobs, samples, context, model.shared, number)
        plain, stepped = (
            aggregate_clients(
                replace(
                    context,
                    roles=with_steps(variant.roles(), server_optimiser=server_optimiser),
                    config=replace(context.config, max_client_fraction=1.0),
                ),
                blobs,
                model,
                number,
                clients,
            )
            for variant, server_optimiser in (
                (FedAvg(), None),
                (method, optimiser or method.roles().techniques.server_optimiser),
            )
        )
        for name, tensor in stepped.state.shared.items():
            assert not torch.equal(tensor, model.shared[name])
            # Without any momentum yet, FedAvgM takes the plain mean for all.
            same = torch.equal(tensor, plain.state.shared[name])
            assert same == (name in statistics or (number == 1 and isinstance(optimiser, ServerMomentum)))
        assert stepped.state.moments
        assert all(moments.keys() == tensors.keys() - statistics for moments in stepped.state.moments.values())
        model = stepped.state


def test_a_client_that_claims_ever_more_moves_the_mean_no_further_than_its_share(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    three = {"ada": 3, "bob": 10, "cyd": 7}
    half, most = (
        aggregate(FedAvg(), _clients(blobs, {**three, "cyd": samples}), blobs, max_client_fraction=0.5).state.shared
        for samples in (13, 2**40)
    )
    plain = aggregate(FedAvg(), _clients(blobs, {**three, "cyd": 2**40}), blobs, max_client_fraction=1.0).state.shared
    assert all(torch.equal(most[name], half[name]) for name in STATE)
    cyd = small_change({name: tensor.numpy() for name, tensor in STATE.items()}, "cyd", 1, 0.1)
    for name, old in STATE.items():
        np.testing.assert_allclose(plain[name].numpy(), old.numpy() + cyd[name], rtol=0, atol=1e-6)


def test_a_median_of_two_has_capped_weights_where_it_takes_the_mean(tmp_path: Path) -> None:
    """A robust rule takes the weighted mean where too few clients share an element."""
    blobs = BlobStore(tmp_path)
    clients, even = _clients(blobs, {"ada": 3, "bob": 2**40}), _clients(blobs, {"ada": 3, "bob": 3})
    capped, equal = (
        aggregate(
            FedAvg(), states, blobs, max_client_fraction=fraction, robust_aggregation=CoordinateMedian(least_clients=3)
        ).state.shared
        for states, fraction in ((clients, 0.5), (even, 1.0))
    )
    assert all(torch.equal(capped[name], equal[name]) for name in STATE)


def test_uniform_weighting_counts_clients(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    lopsided, even = _clients(blobs, {"ada": 1, "bob": 99}), _clients(blobs, {"ada": 5, "bob": 5})
    uniform = aggregate(HeteroFL(weighting="uniform"), lopsided, blobs).state.shared
    equal = aggregate(HeteroFL(weighting="samples"), even, blobs).state.shared
    weighted = aggregate(HeteroFL(weighting="samples"), lopsided, blobs).state.shared
    assert all(torch.equal(uniform[name], equal[name]) for name in STATE)
    assert not all(torch.equal(uniform[name], weighted[name]) for name in STATE)


def test_without_clients_nothing_changes(tmp_path: Path) -> None:
    aggregated = aggregate(HeteroFL(), [], BlobStore(tmp_path)).state.shared
    assert all(torch.equal(aggregated[name], STATE[name]) for name in STATE)


def test_a_median_is_not_moved_by_one_client(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    clients = _clients(blobs, {"ada": 3, "bob": 10, "cyd": 7})
    arrays = [
        decode_arrays(blobs.path(client.update.blob).read_bytes()) for client in clients if client.update is not None
    ]
    roles = with_steps(HeteroFL().roles(), robust_aggregation=CoordinateMedian())
    aggregation = partial(aggregate_clients, replace(PLAN, roles=roles), blobs)
    aggregated = aggregation(ModelState(shared=STATE), 1, clients).state.shared
    for name, old in STATE.items():
        median = np.median([changes[name] for changes in arrays], axis=0)
        np.testing.assert_allclose(aggregated[name].numpy(), old.numpy() + median, rtol=0, atol=1e-6)


def test_an_update_that_cannot_be_added_is_identified_among_others(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    clients = _clients(blobs, {"ada": 3, "bob": 10, "cyd": 7})
    huge = {name: np.full(tensor.shape, 1e30, np.float32) for name, tensor in STATE.items()}
    assert clients[1].update is not None
    clients[1] = replace(
        clients[1], trained=AcceptedUpdate(update=replace(clients[1].update, blob=blobs.add(encode_arrays(huge))))
    )
    aggregated = aggregate(HeteroFL(), clients, blobs)
    assert set(aggregated.refused) == {"bob"}
    without = aggregate(HeteroFL(), [clients[0], clients[2]], blobs)
    assert all(torch.equal(aggregated.state.shared[name], without.state.shared[name]) for name in STATE)


def test_an_update_that_the_disk_has_damaged_is_left_out(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    clients = _clients(blobs, {"ada": 3, "bob": 10})
    assert clients[0].update is not None
    path = blobs.path(clients[0].update.blob)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    aggregated = aggregate(HeteroFL(), clients, blobs)
    assert set(aggregated.refused) == {"ada"}
    assert "damaged" in aggregated.refused["ada"]


def _change(**spoiled: Any) -> bytes:
    arrays = {name: np.zeros(tensor.shape, dtype=np.float32) for name, tensor in STATE.items()}
    return encode_arrays({**arrays, **spoiled})


FIRST = next(iter(STATE))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no container",
        _change(surplus=np.zeros(1, dtype=np.float32)),
        _change(**{FIRST: np.zeros(3, dtype=np.float32)}),
        _change(**{FIRST: np.zeros(STATE[FIRST].shape, dtype=np.float64)}),
        _change(**{FIRST: np.full(STATE[FIRST].shape, np.inf, dtype=np.float32)}),
        _change(**{FIRST: np.full(STATE[FIRST].shape, np.nan, dtype=np.float32)}),
        _change(**{FIRST: np.full(STATE[FIRST].shape, -1.01 * MAGNITUDES[FIRST].largest_change, dtype=np.float32)}),
    ],
)
def test_an_update_that_cannot_be_aggregated_is_refused_on_arrival(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "update").write_bytes(content)
    with pytest.raises(ProtocolError):
        check_update(WHOLE, tmp_path / "update", magnitudes=MAGNITUDES)


def test_the_largest_acceptable_update_is_accepted_and_aggregated(tmp_path: Path) -> None:
    """No aggregation refuses an update that was accepted on arrival."""
    blobs = BlobStore(tmp_path)
    clients = _clients(blobs, {"ada": 3, "bob": 10})
    largest = _change(**{FIRST: np.full(STATE[FIRST].shape, -MAGNITUDES[FIRST].largest_change, dtype=np.float32)})
    assert clients[1].update is not None
    ref = blobs.add(largest)
    check_update(WHOLE, blobs.path(ref), magnitudes=MAGNITUDES)
    clients[1] = replace(clients[1], trained=AcceptedUpdate(update=replace(clients[1].update, blob=ref)))
    assert not aggregate(HeteroFL(), clients, blobs).refused


@pytest.mark.parametrize("robust", [None, CoordinateMedian()], ids=["mean", "median"])
@pytest.mark.parametrize(
    "method", [FedAvg(), HeteroFL(weighting="samples"), FedFA(), FedAdam()], ids=lambda method: method.TYPE
)
def test_a_scaled_update_counts_as_a_smaller_one_of_fewer_samples(
    method: Method, robust: CoordinateMedian | None, tmp_path: Path
) -> None:
    """Bit by bit for powers of two, whatever else a method does with changes and weights."""
    blobs = BlobStore(tmp_path)
    scaled = _clients(blobs, {"ada": 3, "bob": 16, "cyd": 7})
    scaled[1] = replace(at_scale(scaled[1], 0.25), outlier="it is far")
    smaller = _clients(blobs, {"ada": 3, "bob": 4, "cyd": 7})
    assert smaller[1].update is not None
    arrays = decode_arrays(blobs.path(smaller[1].update.blob).read_bytes())
    quarters: dict[str, Any] = {name: np.multiply(array, np.float32(0.25)) for name, array in arrays.items()}
    ref = blobs.add(encode_arrays(quarters))
    smaller[1] = replace(smaller[1], trained=AcceptedUpdate(update=replace(smaller[1].update, blob=ref)))
    changes: dict[str, Any] = {} if robust is None else {"robust_aggregation": robust}
    result, expected = (aggregate(method, clients, blobs, **changes).state.shared for clients in (scaled, smaller))
    unscaled = aggregate(method, [scaled[0], at_scale(scaled[1], 1.0), scaled[2]], blobs, **changes).state.shared
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert not all(torch.equal(result[name], unscaled[name]) for name in unscaled)


def test_a_model_of_one_client_alone_is_never_scaled(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    clients = _clients(blobs, {"ada": 3, "bob": 16, "cyd": 7})
    scaled = [clients[0], replace(at_scale(clients[1], 0.25), outlier="it is far"), clients[2]]
    result, expected = (aggregate(Standalone(), states, blobs).state.copies for states in (scaled, clients))
    assert result.keys() == expected.keys() == {"ada", "bob", "cyd"}
    for client_id, copies in expected.items():
        assert all(torch.equal(result[client_id][name], tensor) for name, tensor in copies.items())


def test_an_update_is_measured_by_the_kind_of_its_tensors(tmp_path: Path) -> None:
    network = network_of(replace(PLAN.config.model, norm="batch"))
    state = init_state(network, 0)
    form = UpdateForm.of(network, network.full_architecture(), Uncompressed())
    head = [name for name in state if name.startswith("head")]
    values = {name: 4.0 if name in head else 3.0 if name in form.exact else 2.0 for name in state}
    arrays = {name: np.full(tensor.shape, -values[name], np.float32) for name, tensor in state.items()}
    (tmp_path / "update").write_bytes(encode_arrays(arrays))
    held = {name: Magnitude(largest_change=4.0, mean_square=values[name] ** 2 / 4) for name in state}
    change_size = check_update(form, tmp_path / "update", magnitudes=held, own=frozenset(head))
    assert change_size == ChangeSize(weights=2.0, statistics=3.0, own=4.0, held_weights=1.0, held_statistics=1.5)
    arrays[FIRST][:] = 0
    (tmp_path / "update").write_bytes(encode_arrays(arrays))
    weights = [arrays[name] for name in state if values[name] == 2.0]
    rms = np.sqrt(np.mean(np.square(np.concatenate([array.ravel() for array in weights]).astype(np.float64))))
    change_size = check_update(form, tmp_path / "update", magnitudes=held, own=frozenset(head))
    assert change_size.weights == pytest.approx(rms, rel=1e-12)


def test_a_checkpoint_is_restored_bit_by_bit_and_damage_is_detected(tmp_path: Path) -> None:
    sha256 = save_checkpoint(tmp_path, 3, STATE)
    path = checkpoint_path(tmp_path, 3)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    back = load_checkpoint(tmp_path, 3, sha256)
    assert all(torch.equal(back[name], STATE[name]) for name in STATE)
    assert save_checkpoint(tmp_path / "again", 3, dict(reversed(list(STATE.items())))) == sha256
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(FileError, match="damaged"):
        load_checkpoint(tmp_path, 3, "0" * 64)
    with pytest.raises(FileError, match="cannot be read"):
        load_checkpoint(tmp_path, 4, sha256)
