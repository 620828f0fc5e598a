"""Every method, robust rule, optimiser, norm and check computes where the model is.

Without a GPU a second device is one in name (`elsewhere`), which refuses what a real one refuses. With a GPU the same
tests run on it, too: `make gpu`.
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
"""Methods that aggregation and do no other arithmetic on the server, so that an accelerator has the CPU's bits."""
PLACES = [
    pytest.param(ELSEWHERE, id="elsewhere"),
    *([pytest.param(torch.device("cuda"), id="cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    found: torch.device = request.param
    if found != ELSEWHERE:
        yield found
        return
    # Other threads do not know of the second device.
    monkeypatch.setattr(exact_sums, "run_until_one_fails", _in_turn)
    with elsewhere() as there:
        yield there


def _in_turn(jobs: Iterable[Callable[[], bool]], thread_count: int) -> None:
    left = deque(jobs)
    while left and left.popleft()():
        pass


def aggregated(context: RunContext, place: torch.device, folder: Path) -> ModelState:
    return play(context, draw_state(context.network).to(place), list_clients(context), folder).state


def check(context: RunContext, place: torch.device, folder: Path, *, exact: bool) -> None:
    """A round of every size there is a round of every size here."""
    there, here = aggregated(context, place, folder / "there"), aggregated(context, CPU, folder / "here")
    told = {name: tensor for name, tensor in pack_state(there).items() if not name.endswith("/json")}
    assert {tensor.device.type for tensor in told.values()} == {place.type}
    back = pack_state(there.to(CPU))
    if exact or place == ELSEWHERE:
        assert have_same_bits(back, pack_state(here))
        return
    for name, tensor in pack_state(here).items():
        torch.testing.assert_close(back[name], tensor, rtol=1e-4, atol=1e-6)


OWN_CODE = ("heterofl", "fedfa", "flexifed", "dynamic_selection", "sattler")
"""One for each way to aggregate: elements, grafted ones, common layers, lessons for sizes, and clusters."""


@pytest.mark.parametrize("name", mostly_long(QUICK, *OWN_CODE))
def test_a_round_of_every_method_is_aggregated_where_the_model_is(
    name: str, place: torch.device, tmp_path: Path
) -> None:
    check(make_context(QUICK[name]), place, tmp_path, exact=name in EXACT)


MADE = {one.TYPE: one for one in (CoordinateMedian(), MultiKrum(), NormClipping(max_norm=2.0), TrimmedMean())}


@pytest.mark.parametrize("name", mostly_long(MADE, "multi_krum", "coordinate_median"))
def test_so_it_is_with_every_merge(name: str, place: torch.device, tmp_path: Path) -> None:
    assert MADE.keys() == ROBUST_AGGREGATIONS.keys()
    check(make_context(HeteroFL(), robust_aggregation=MADE[name]), place, tmp_path, exact=False)


@pytest.mark.parametrize("name", mostly_long(SERVER_OPTIMISERS, "fedadam"))
def test_so_it_is_with_every_server_optimiser(name: str, place: torch.device, tmp_path: Path) -> None:
    check(
        make_context(FedAvg(model="nested"), server_optimiser=SERVER_OPTIMISERS[name]()), place, tmp_path, exact=False
    )


@pytest.mark.parametrize("norms", ["averaged", "recalibrated"])
def test_a_model_is_used_judged_and_scored_where_it_is(norms: Any, place: torch.device) -> None:
    context = make_context(HeteroFL(), replace(MODEL, norm="batch"), norms=norms)
    inputs = torch.randn(40, *MODEL.input_shape, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(40) % MODEL.class_count
    views = Views(context=context, samples=inputs)
    client = Participant(client_id="ada", architecture=context.space[-2], size=context.space[-2])
    found = []
    for device in (CPU, place):
        seen = views.prepare_tensors(views.of(draw_state(context.network).to(device), client))
        assert {tensor.device.type for tensor in seen.values()} == {device.type}
        evaluation = evaluate(context.network, client.architecture, seen, inputs, labels)
        score = zico_score(
            context.network, client.architecture, seen, [(inputs[:8], labels[:8]), (inputs[8:16], labels[8:16])]
        )
        found.append((evaluation.loss, evaluation.accuracy, score))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("share", mostly_long(["transform", "crop"], "transform"))
def test_networks_grow_and_share_where_the_model_is(share: Any, place: torch.device, tmp_path: Path) -> None:
    """Wider and deeper ones, with noise, in both directions."""
    method = replace(METHOD, share=share, large_to_small=True, noise=0.1, alpha=0.0)
    (here, lineages), (there, same) = (family(method, tmp_path / str(one), one) for one in (CPU, place))
    assert lineages == same
    assert "wider" in lineages[1].reason
    assert "deeper" in lineages[2].reason
    found = {name: there.of(name).shared for name in there.network_ids}
    assert {tensor.device.type for own in found.values() for tensor in own.values()} == {place.type}
    for name, own in found.items():
        for key, tensor in own.items():
            torch.testing.assert_close(tensor.cpu(), here.of(name).shared[key], rtol=1e-5, atol=1e-6)


def test_what_leaves_the_server_has_the_same_bytes(place: torch.device, tmp_path: Path) -> None:
    context = make_context(QUICK["fedadam"])
    here = aggregated(context, CPU, tmp_path / "blobs")
    there = here.to(place)
    architecture = context.space[0]
    assert encode_submodel(context.network, architecture, there.shared) == encode_submodel(
        context.network, architecture, here.shared
    )
    sha256 = save_checkpoint(tmp_path / "there", 1, pack_state(there))
    assert sha256 == save_checkpoint(tmp_path / "here", 1, pack_state(here))
    back = unpack_state(load_checkpoint(tmp_path / "there", 1, sha256)).to(place)
    assert have_same_bits(pack_state(back.to(CPU)), pack_state(here))


def test_a_second_device_refuses_what_an_accelerator_refuses() -> None:
    with elsewhere() as there:
        one, other = torch.ones(2, 3, device=there), torch.ones(2, 3)
        assert (one.device, (one * 2 + one).cpu().sum().item()) == (ELSEWHERE, 18.0)
        for wrong in (
            lambda: one + other,
            lambda: torch.cat([one, other]),
            one.numpy,
            lambda: one.add_(other),
        ):
            with pytest.raises(RuntimeError):
                wrong()
        assert one[torch.tensor([1])].device == ELSEWHERE
        with pytest.raises(RuntimeError, match="on the CPU with indices"):
            other[torch.tensor([1], device=there)]


def test_a_run_on_an_accelerator_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device is 'cuda', but PyTorch .* finds no GPU here"):
        compute_device("cuda")
    assert compute_device("cpu") == CPU
    assert make_config(HeteroFL(), device="cuda").fingerprint() != make_config(HeteroFL()).fingerprint()


@pytest.mark.parametrize("method", [FedADP(choice="declared"), FlexiFed(choice="declared")], ids=repr)
def test_a_union_is_succeeded_where_the_model_is(method: AnyMethod, place: torch.device, tmp_path: Path) -> None:
    """After a round of each of its networks, by one that a client brings later."""
    found = []
    for device in (CPU, place):
        context = united.context_of(method)
        before = (united.retired(context), *united.begun(context, united.SMALL, united.DEEP))
        state = united.first_model(context, before).to(device)
        alone, blobs = replace(context, first=context.get_declared(before[1])), BlobStore(tmp_path / str(device))
        clients = [store_update(alone, DrawnClient(name=f"client{size}", size=size), blobs) for size in range(2)]
        after = aggregate_clients(context, blobs, state, 1, clients, None, before, (united.WIDE,)).state
        assert after.network_ids == ("union2",)
        assert {tensor.device.type for tensor in pack_state(after).values()} <= {device.type, "cpu"}
        assert {tensor.device.type for tensor in after.of("union2").shared.values()} == {device.type}
        found.append(pack_state(after.to(CPU)))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-6)
