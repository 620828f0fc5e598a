"""Every method, robust rule, optimiser, norm and check computes on the device of the model.

Without a GPU the second device is a simulated one (`elsewhere`) that refuses the same operations as a real one. With a
GPU the same tests run on it, too: `make gpu`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic.zico_reference import zico_score
from elsewhere import ELSEWHERE, elsewhere
from matrices import mostly_long
from server.aggregating import aggregate_clients
from server.methods import test_uniting as united
from server.methods.method_cases import QUICK
from server.methods.test_fedtrans import METHOD
from server.methods.test_soft_sharing import family

from subfleet.aggregation.checkpoint import load_checkpoint, save_checkpoint
from subfleet.aggregation.devices import compute_device
from subfleet.aggregation.updates import encode_submodel
from subfleet.aggregation.views import Views
from subfleet.elastic import exact_sums
from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.model_state import ModelState, pack_state, unpack_state
from subfleet.elastic.robust_aggregation import (
    ROBUST_AGGREGATIONS,
    CoordinateMedian,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from subfleet.elastic.server_optimisers import SERVER_OPTIMISERS
from subfleet.methods import AnyMethod
from subfleet.methods.aggregator import Participant
from subfleet.methods.fedadp import FedADP
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.errors import ConfigError
from subfleet.rounds.context import RunContext
from subfleet.testing.rounds import (
    MODEL,
    DrawnClient,
    draw_state,
    list_clients,
    make_config,
    make_context,
    play,
    store_update,
)
from subfleet.testing.submodels import have_same_bits
from subfleet.transport.blob_store import BlobStore

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EXACT = {
    "anycostfl",
    "fedavg",
    "federated_dropout",
    "fedprox",
    "fedrolex",
    "fjord",
    "flexifed",
    "heterofl",
    "nefl",
    "standalone",
}
"""Methods with no server arithmetic but aggregation, for which an accelerator computes the same bits as the CPU."""
PLACES = [
    pytest.param(ELSEWHERE, id="elsewhere"),
    *([pytest.param(torch.device("cuda"), id="cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []),
]


@pytest.fixture(params=PLACES)
def other_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    requested: torch.device = request.param
    if requested != ELSEWHERE:
        yield requested
        return
    # The simulated device exists in this thread only.
    monkeypatch.setattr(exact_sums, "run_until_one_fails", _run_in_turn)
    with elsewhere() as there:
        yield there


def _run_in_turn(jobs: Iterable[Callable[[], bool]], thread_count: int) -> None:
    waiting = deque(jobs)
    while waiting and waiting.popleft()():
        pass


def aggregate_once(context: RunContext, other_device: torch.device, folder: Path) -> ModelState:
    return play(context, draw_state(context.network).to(other_device), list_clients(context), folder).state


def check(context: RunContext, other_device: torch.device, folder: Path, *, exact: bool) -> None:
    """A round with clients of every size gives the same model on both devices."""
    there, here = aggregate_once(context, other_device, folder / "there"), aggregate_once(context, CPU, folder / "here")
    tensors = {name: tensor for name, tensor in pack_state(there).items() if not name.endswith("/json")}
    assert {tensor.device.type for tensor in tensors.values()} == {other_device.type}
    back = pack_state(there.to(CPU))
    if exact or other_device == ELSEWHERE:
        assert have_same_bits(back, pack_state(here))
        return
    for name, tensor in pack_state(here).items():
        torch.testing.assert_close(back[name], tensor, rtol=1e-4, atol=1e-6)


OWN_CODE = ("heterofl", "fedfa", "flexifed", "dynamic_selection", "sattler")
"""One for each kind of aggregation: elements, grafted blocks, common layers, distillation and clusters."""


@pytest.mark.parametrize("name", mostly_long(QUICK, *OWN_CODE))
def test_a_round_of_every_method_is_aggregated_where_the_model_is(
    name: str, other_device: torch.device, tmp_path: Path
) -> None:
    check(make_context(QUICK[name]), other_device, tmp_path, exact=name in EXACT)


RULES = {rule.TYPE: rule for rule in (CoordinateMedian(), MultiKrum(), NormClipping(max_norm=2.0), TrimmedMean())}


@pytest.mark.parametrize("name", mostly_long(RULES, "multi_krum", "coordinate_median"))
def test_every_robust_rule_aggregates_where_the_model_is(name: str, other_device: torch.device, tmp_path: Path) -> None:
    assert RULES.keys() == ROBUST_AGGREGATIONS.keys()
    check(make_context(HeteroFL(), robust_aggregation=RULES[name]), other_device, tmp_path, exact=False)


@pytest.mark.parametrize("name", mostly_long(SERVER_OPTIMISERS, "fedadam"))
def test_every_server_optimiser_steps_where_the_model_is(name: str, other_device: torch.device, tmp_path: Path) -> None:
    check(
        make_context(FedAvg(model="nested"), server_optimiser=SERVER_OPTIMISERS[name]()),
        other_device,
        tmp_path,
        exact=False,
    )


@pytest.mark.parametrize("norms", ["averaged", "recalibrated"])
def test_a_model_is_used_evaluated_and_scored_where_it_is(norms: Any, other_device: torch.device) -> None:
    context = make_context(HeteroFL(), replace(MODEL, norm="batch"), norms=norms)
    inputs = torch.randn(40, *MODEL.input_shape, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(40) % MODEL.class_count
    views = Views(context=context, samples=inputs)
    client = Participant(client_id="ada", architecture=context.space[-2], size=context.space[-2])
    results = []
    for device in (CPU, other_device):
        seen = views.prepare_tensors(views.of(draw_state(context.network).to(device), client))
        assert {tensor.device.type for tensor in seen.values()} == {device.type}
        evaluation = evaluate(context.network, client.architecture, seen, inputs, labels)
        score = zico_score(
            context.network, client.architecture, seen, [(inputs[:8], labels[:8]), (inputs[8:16], labels[8:16])]
        )
        results.append((evaluation.loss, evaluation.accuracy, score))
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.parametrize("share", mostly_long(["transform", "crop"], "transform"))
def test_networks_grow_and_share_where_the_model_is(share: Any, other_device: torch.device, tmp_path: Path) -> None:
    """Networks become wider and deeper, with noise, and share in both directions."""
    method = replace(METHOD, share=share, large_to_small=True, noise=0.1, alpha=0.0)
    (here, lineages), (there, same) = (family(method, tmp_path / str(device), device) for device in (CPU, other_device))
    assert lineages == same
    assert "wider" in lineages[1].reason
    assert "deeper" in lineages[2].reason
    shared = {name: there.of(name).shared for name in there.network_ids}
    assert {tensor.device.type for own in shared.values() for tensor in own.values()} == {other_device.type}
    for name, own in shared.items():
        for key, tensor in own.items():
            torch.testing.assert_close(tensor.cpu(), here.of(name).shared[key], rtol=1e-5, atol=1e-6)


def test_what_leaves_the_server_has_the_same_bytes(other_device: torch.device, tmp_path: Path) -> None:
    context = make_context(QUICK["fedadam"])
    here = aggregate_once(context, CPU, tmp_path / "blobs")
    there = here.to(other_device)
    architecture = context.space[0]
    assert encode_submodel(context.network, architecture, there.shared) == encode_submodel(
        context.network, architecture, here.shared
    )
    sha256 = save_checkpoint(tmp_path / "there", 1, pack_state(there))
    assert sha256 == save_checkpoint(tmp_path / "here", 1, pack_state(here))
    back = unpack_state(load_checkpoint(tmp_path / "there", 1, sha256)).to(other_device)
    assert have_same_bits(pack_state(back.to(CPU)), pack_state(here))


def test_a_second_device_refuses_what_an_accelerator_refuses() -> None:
    with elsewhere() as there:
        remote, local = torch.ones(2, 3, device=there), torch.ones(2, 3)
        assert (remote.device, (remote * 2 + remote).cpu().sum().item()) == (ELSEWHERE, 18.0)
        for wrong in (
            lambda: remote + local,
            lambda: torch.cat([remote, local]),
            remote.numpy,
            lambda: remote.add_(local),
        ):
            with pytest.raises(RuntimeError):
                wrong()
        assert remote[torch.tensor([1])].device == ELSEWHERE
        with pytest.raises(RuntimeError, match="on the CPU with indices"):
            local[torch.tensor([1], device=there)]


def test_a_missing_accelerator_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device is 'cuda', but PyTorch .* finds no GPU here"):
        compute_device("cuda")
    assert compute_device("cpu") == CPU
    assert make_config(HeteroFL(), device="cuda").fingerprint() != make_config(HeteroFL()).fingerprint()


@pytest.mark.parametrize("method", [FedADP(choice="declared"), FlexiFed(choice="declared")], ids=repr)
def test_a_union_is_succeeded_where_the_model_is(method: AnyMethod, other_device: torch.device, tmp_path: Path) -> None:
    """After a round with each of its networks, a larger union succeeds it when a client brings another network."""
    states = []
    for device in (CPU, other_device):
        context = united.context_of(method)
        before = (united.make_retired(context), *united.begin_unions(context, united.SMALL, united.DEEP))
        state = united.load_first_model(context, before).to(device)
        alone, blobs = replace(context, first=context.get_declared(before[1])), BlobStore(tmp_path / str(device))
        clients = [store_update(alone, DrawnClient(name=f"client{size}", size=size), blobs) for size in range(2)]
        after = aggregate_clients(context, blobs, state, 1, clients, None, before, (united.WIDE,)).state
        assert after.network_ids == ("union2",)
        assert {tensor.device.type for tensor in pack_state(after).values()} <= {device.type, "cpu"}
        assert {tensor.device.type for tensor in after.of("union2").shared.values()} == {device.type}
        states.append(pack_state(after.to(CPU)))
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-6)
