"""Properties of individual methods."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subfleet.elastic.maps import extract
from subfleet.methods import AnyMethod
from subfleet.methods.adaptive import FedAdam, FedYogi
from subfleet.methods.aggregator import keep_aggregate
from subfleet.methods.anycostfl import AnycostFL
from subfleet.methods.assigner import Draw
from subfleet.methods.federated_dropout import FederatedDropout
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fedprox import FedProx
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.fjord import FjORD
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.nefl import NeFL
from subfleet.methods.standalone import Standalone
from subfleet.programs.supply import build_train_request
from subfleet.protocol.submodel import Architecture, Explicit, Roll
from subfleet.rounds.context import RunContext
from subfleet.testing.rounds import (
    CLASSES,
    MODEL,
    SEED,
    DrawnClient,
    compute_logits,
    draw_change,
    draw_state,
    find_held,
    list_clients,
    make_assignee,
    make_context,
    place_client,
    play,
    view_model,
    with_steps,
)
from subfleet.testing.submodels import have_same_bits


def test_a_tensor_is_averaged_over_those_who_hold_it(tmp_path: Path) -> None:
    context = make_context(HeteroFL(weighting="samples"))
    clients = [
        DrawnClient(name="small", size=0, samples=5),
        DrawnClient(name="large", size=len(context.space) - 1, samples=15),
    ]
    state = draw_state(context.network)
    aggregated = play(context, state, clients, tmp_path).state.shared
    small, large = (draw_change(context, client, 1)["stem.weight"].double() for client in clients)
    rows = len(small)
    expected = large.clone()
    expected[:rows] = (5 * small + 15 * large[:rows]) / 20
    torch.testing.assert_close(
        aggregated["stem.weight"] - state.shared["stem.weight"], expected.float(), rtol=0, atol=1e-6
    )


def test_rows_of_classes_that_nobody_holds_keep_their_bits(tmp_path: Path) -> None:
    context = make_context(HeteroFL(class_mask=True))
    size = len(context.space) - 1
    clients = [
        DrawnClient(name="a", size=size, classes=(4, 0, 0, 1)),
        DrawnClient(name="b", size=size, classes=(9, 2)),
    ]
    state = draw_state(context.network)
    aggregated = play(context, state, clients, tmp_path).state.shared
    for name in ("head.weight", "head.bias"):
        assert torch.equal(aggregated[name][2], state.shared[name][2])
        change = [draw_change(context, client, 1)[name] for client in clients]
        moved = aggregated[name] - state.shared[name]
        torch.testing.assert_close(moved[0], (change[0][0] + change[1][0]) / 2, rtol=0, atol=1e-6)
        torch.testing.assert_close(moved[1], change[1][1], rtol=0, atol=1e-6)
        torch.testing.assert_close(moved[3], change[0][3], rtol=0, atol=1e-6)
    assert CLASSES == 4
    assert context.training(1).objective.class_mask


@pytest.mark.parametrize("method", [HeteroFL(depth=False), FedFA(depth=False)], ids=lambda method: method.TYPE)
def test_the_uniform_space_is_nested_and_methods_cut_widths_alone_where_asked(method: AnyMethod) -> None:
    context = make_context(method)
    assert all(len(size.blocks) == len(context.network.blocks) for size in context.space)
    assert len(context.space) == 3
    shapes = [context.network.shapes(size) for size in context.space]
    for smaller, larger in itertools.pairwise(shapes):
        assert all(
            smaller_dim <= larger_dim
            for name in smaller
            for smaller_dim, larger_dim in zip(smaller[name], larger[name], strict=True)
        )


def test_fedprox_asks_for_the_proximal_term() -> None:
    training = make_context(FedProx(mu=0.3)).training(1)
    assert (training.objective.proximal, training.proximal_mu) == (True, 0.3)
    assert len(make_context(FedProx(model="nested")).space) > len(make_context(FedProx()).space) == 1


@pytest.mark.slow
def test_fjord_draws_a_nested_student_of_every_width_that_fits() -> None:
    context = make_context(FjORD())
    training = context.training(1, student=context.space[0])
    assert (training.objective.distillation, training.distillation_weight) == ("self", 1.0)
    students = Counter(_draw_student(context, 2, number) for number in range(300))
    assert students.keys() == {context.space[0], context.space[1], None}
    # The 3 widths are equally likely: a binomial of 300 draws lies within 5 standard deviations of 100.
    assert all(abs(count - 100) < 5 * (300 * 2 / 9) ** 0.5 for count in students.values())
    plain = make_context(FjORD(self_distillation=False))
    memory_bytes = plain.first.candidates[2].training_memory_bytes["onnx"]
    chosen = {
        candidate.architecture.architecture_id
        for number in range(60)
        if (
            candidate := plain.roles.assigner.assign(
                make_assignee(plain, "a", memory_bytes=memory_bytes, round_number=number)
            ).candidate
        )
    }
    assert chosen == {size.architecture_id for size in context.space[:3]}


def _draw_student(context: RunContext, size: int, number: int) -> Architecture | None:
    draw = Draw(seed=SEED, round=number, client_id="a")
    return context.roles.training.student(context.network, context.space[size], draw)


@pytest.mark.slow
def test_fjord_teaches_no_width_to_itself_and_trains_it_on_labels_alone() -> None:
    """A width would learn nothing from a copy of itself, and the copy would double the memory."""
    context = make_context(FjORD())
    for index, size in enumerate(context.space):
        assert size not in {_draw_student(context, index, number) for number in range(60)}
    assert {_draw_student(context, 0, number) for number in range(60)} == {None}
    alone, plain = context.training(1), make_context(FjORD(self_distillation=False)).training(1)
    assert (alone.objective, alone.distillation_weight) == (plain.objective, 0.0)
    request = build_train_request(context.network, context.space[0], "onnx", alone)
    assert request == build_train_request(context.network, context.space[0], "onnx", plain)


def test_a_rolling_window_holds_every_index_equally_often_and_all_axes_share_its_origin() -> None:
    context = make_context(FedRolex())
    client = DrawnClient(name="a", size=1)
    counts = {name: torch.zeros(axis.size) for name, axis in context.network.axes.items() if axis.kind == "channel"}
    groups = 12  # a multiple of 4 and 6, the groups of the two widths
    for number in range(1, groups + 1):
        architecture = place_client(context, client, number)
        starts = {window.start for _, window in architecture.axes if isinstance(window, Roll) and window.size == 4}
        assert len(starts) == 1
        for name, window in architecture.axes:
            assert isinstance(window, Roll)
            size = context.network.axes[name].size
            counts[name][[(window.start + offset) % size for offset in range(window.size)]] += 1
    for name, held in counts.items():
        assert torch.equal(held, torch.full_like(held, groups * _get_width(context, name) / len(held)))


def _get_width(context: RunContext, axis: str) -> int:
    return context.network.sizes(context.space[1])[axis]


def test_dropout_keeps_random_groups_of_each_axis_anew_for_each_client_and_round() -> None:
    context = make_context(FederatedDropout())
    architectures = [
        place_client(context, DrawnClient(name=name, size=1), number) for name in ("a", "b") for number in (1, 2)
    ]
    assert len({architecture.architecture_id for architecture in architectures}) == 4
    assert architectures[0] == place_client(context, DrawnClient(name="a", size=1), 1)
    for architecture in architectures:
        context.network.check(architecture)
        assert context.network.size_of(architecture).architecture_id == context.space[1].architecture_id
        assert all(isinstance(indices, Explicit) for _, indices in architecture.axes)
    counts = torch.zeros(8)
    for number in range(400):
        channels = dict(place_client(context, DrawnClient(name="a", size=1), number).axes)["section0.stream"]
        assert isinstance(channels, Explicit)
        counts[list(channels.indices)] += 1
    # 4 of 8 are kept: a binomial of 400 draws lies within 5 standard deviations of 200.
    assert (counts - 200).abs().max() < 5 * (400 * 0.25) ** 0.5


@pytest.mark.slow
def test_anycostfl_sorts_the_tensors_of_each_size_with_the_channels(tmp_path: Path) -> None:
    """A size's own tensors follow the order of the channels that they belong to."""
    context = make_context(AnycostFL(), norms="bank")
    unsorted = replace(context, roles=with_steps(context.roles, after_round=keep_aggregate))
    clients = [DrawnClient(name=name, size=size) for name, size in (("a", 1), ("b", 3), ("c", 1), ("d", 4))]
    state = draw_state(context.network)
    for number in (1, 2, 3):
        before = play(unsorted, state, clients, tmp_path, number).state
        state = play(context, state, clients, tmp_path, number).state
        assert state.copies.keys() == {context.space[index].architecture_id for index in (1, 3, 4)}
        for client in clients:
            unsorted_model, sorted_model = (view_model(context, model, client) for model in (before, state))
            assert compute_logits(context, sorted_model) == pytest.approx(
                compute_logits(context, unsorted_model), rel=1e-4, abs=1e-4
            )
        for key, own in before.copies.items():
            for name, copy in own.items():
                pairs = zip(before.shared[name].tolist(), copy.tolist(), strict=True)
                after = zip(state.shared[name].tolist(), state.copies[key][name].tolist(), strict=True)
                assert sorted(after) == sorted(pairs)
        assert any(not torch.equal(before.shared[name], state.shared[name]) for name in state.shared)


def test_anycostfl_sorts_channels_and_changes_no_output(tmp_path: Path) -> None:
    context = make_context(AnycostFL())
    assert len(context.space) > 4
    state = draw_state(context.network)
    whole = [DrawnClient(name=name, size=len(context.space) - 1, samples=count) for name, count in (("a", 3), ("b", 8))]
    moments = {"mean": {name: tensor.square() for name, tensor in state.shared.items()}}
    unsorted = replace(context, roles=with_steps(context.roles, after_round=keep_aggregate))
    before = play(unsorted, replace(state, moments=moments), whole, tmp_path).state
    after = play(context, replace(state, moments=moments), whole, tmp_path).state
    assert compute_logits(context, after.shared) == pytest.approx(compute_logits(context, before.shared), abs=1e-4)
    assert not have_same_bits(after.shared, before.shared)
    for name, axis in context.network.axes.items():
        if axis.kind != "class":
            squares = torch.zeros(axis.size, dtype=torch.float64)
            for decl in context.network.tensors.values():
                for dim, axis_name in enumerate(decl.axes):
                    if axis_name == name:
                        squares += (
                            after.shared[decl.name].double().square().movedim(dim, 0).reshape(axis.size, -1).sum(1)
                        )
            groups = squares.reshape(-1, axis.granularity).sum(1)
            assert (groups.diff() <= 1e-9).all()
    # The moments follow the order of their weights.
    drawn = {name: tensor.double().sum().item() for name, tensor in moments["mean"].items()}
    assert {name: tensor.double().sum().item() for name, tensor in after.moments["mean"].items()} == pytest.approx(
        drawn
    )
    pairs = torch.stack([before.shared["stem.weight"].flatten(), moments["mean"]["stem.weight"].flatten()], dim=1)
    moved = torch.stack([after.shared["stem.weight"].flatten(), after.moments["mean"]["stem.weight"].flatten()], dim=1)
    assert sorted(map(tuple, pairs.tolist())) == sorted(map(tuple, moved.tolist()))


@pytest.mark.parametrize("method", [FedAdam(model="nested"), FedYogi(model="nested")], ids=lambda method: method.TYPE)
def test_a_server_optimiser_has_moments_of_trained_elements_only(method: AnyMethod, tmp_path: Path) -> None:
    context = make_context(method)
    state, small = draw_state(context.network), [DrawnClient(name="a", size=0)]
    first = play(context, state, small, tmp_path).state
    held = find_held(context, small)
    for name in held:
        if name in first.moments["mean"]:
            assert not first.moments["mean"][name][~held[name]].any()
        assert torch.equal(first.shared[name][~held[name]], state.shared[name][~held[name]])
    step = (first.shared["stem.weight"] - state.shared["stem.weight"])[held["stem.weight"]]
    change = draw_change(context, small[0], 1)["stem.weight"].flatten()
    square = 0.99 * 1e-6 + 0.01 * change**2 if method.TYPE == "fedadam" else 1e-6 + 0.01 * change**2
    torch.testing.assert_close(step, 0.01 * 0.1 * change / (square.sqrt() + 1e-3), rtol=0, atol=1e-5)


def test_a_standalone_client_learns_from_nobody(tmp_path: Path) -> None:
    context = make_context(Standalone())
    alone, together = (
        [DrawnClient(name="a", size=2)],
        [DrawnClient(name="a", size=2), DrawnClient(name="b", size=2, scale=5.0)],
    )
    state = draw_state(context.network)
    aggregated = [play(context, state, clients, tmp_path).state for clients in (alone, together)]
    assert have_same_bits(view_model(context, aggregated[0], alone[0]), view_model(context, aggregated[1], alone[0]))
    assert all(have_same_bits(model.shared, state.shared) for model in aggregated)
    change = draw_change(context, alone[0], 1)
    received = extract(context.network, context.space[2], state.shared)
    trained = extract(context.network, context.space[2], view_model(context, aggregated[0], alone[0]))
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, received[name] + change[name], rtol=0, atol=1e-6)


def test_nefl_keeps_a_bank_of_norms_and_steps_for_each_size(tmp_path: Path) -> None:
    context = make_context(NeFL(), replace(MODEL, learnable_steps=True))
    state = draw_state(context.network)
    small, large = DrawnClient(name="a", size=0), DrawnClient(name="b", size=len(context.space) - 1)
    before = play(context, state, [small, large], tmp_path).state
    after = play(context, before, [small], tmp_path, 2).state
    bank = [name for name in context.network.tensors if ".norm" in name or name.startswith("norm.") or "step" in name]
    assert any("step" in name for name in bank)
    for name in bank:
        assert torch.equal(view_model(context, after, large)[name], view_model(context, before, large)[name])
        assert torch.equal(after.shared[name], state.shared[name])
    assert not torch.equal(
        view_model(context, after, small)["norm.weight"], view_model(context, before, small)["norm.weight"]
    )
    assert not torch.equal(
        view_model(context, after, large)["stem.weight"], view_model(context, before, large)["stem.weight"]
    )
    sizes = {
        chosen.architecture.architecture_id
        for number in range(60)
        if (chosen := context.roles.assigner.assign(make_assignee(context, "a", round_number=number)).candidate)
        is not None
    }
    assert sizes == {size.architecture_id for size in context.space[-3:]}


@pytest.mark.parametrize("method", [FedFA(), FlexiFed(), Standalone()], ids=lambda method: method.TYPE)
def test_a_fixed_architecture_is_kept_or_the_client_sits_out(method: AnyMethod) -> None:
    context = make_context(method)
    needs = [candidate.training_memory_bytes["onnx"] for candidate in context.first.candidates]
    assign = context.roles.assigner.assign
    first = assign(make_assignee(context, "a", memory_bytes=needs[3])).candidate
    assert first is not None
    richer = assign(make_assignee(context, "a", memory_bytes=2**40, previous=first.architecture)).candidate
    assert richer == first
    assert assign(make_assignee(context, "a", memory_bytes=min(needs), previous=first.architecture)).candidate is None


def test_fedfa_grafts_what_the_last_block_learned_onto_the_blocks_that_a_client_lacks(tmp_path: Path) -> None:
    context = make_context(FedFA(scaling=False, class_mask=False))
    whole = len(context.space) - 1
    shallow = next(
        index
        for index, size in enumerate(context.space)
        if not size.axes and size.blocks == context.space[whole].blocks[:2]
    )
    clients = [DrawnClient(name="deep", size=whole, samples=6), DrawnClient(name="shallow", size=shallow, samples=2)]
    state = draw_state(context.network)
    aggregated = play(context, state, clients, tmp_path).state.shared
    deep, short = (draw_change(context, client, 1) for client in clients)
    lacking, last = "section1.block2.layer1.weight", "section1.block1.layer1.weight"
    expected = (6 * deep[lacking] + 2 * short[last]) / 8
    torch.testing.assert_close(aggregated[lacking] - state.shared[lacking], expected, rtol=0, atol=1e-6)
    ungrafted = make_context(FedFA(scaling=False, grafting=False, class_mask=False))
    assert set(context.space) < set(ungrafted.space), "sizes that cannot be grafted are no sizes of the run"
    clients = [replace(client, size=ungrafted.space.index(context.space[client.size])) for client in clients]
    plain = play(ungrafted, state, clients, tmp_path)
    torch.testing.assert_close(plain.state.shared[lacking] - state.shared[lacking], deep[lacking], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_fedfa_as_printed_moves_a_model_that_nobody_trained(tmp_path: Path) -> None:
    context = make_context(FedFA(fidelity="paper", class_mask=False))
    state = draw_state(context.network)
    clients = [replace(client, scale=0.0) for client in list_clients(context)]
    assert not have_same_bits(play(context, state, clients, tmp_path).state.shared, state.shared)


@pytest.mark.slow
def test_fedfa_keeps_the_direction_of_the_many_when_one_update_is_boosted(tmp_path: Path) -> None:
    likeness = {}
    for scaling in (False, True):
        context = make_context(FedFA(scaling=scaling, class_mask=False))
        state, size = draw_state(context.network), len(context.space) - 1
        honest = [DrawnClient(name=f"honest{index}", size=size, scale=0.01) for index in range(4)]
        attacker = DrawnClient(name="attacker", size=size, scale=20.0)
        mean, attacked = (
            play(context, state, clients, tmp_path).state.shared["stem.weight"].flatten()
            for clients in (honest, [*honest, attacker])
        )
        likeness[scaling] = float(torch.cosine_similarity(mean, attacked, dim=0))
    assert likeness[True] > 0.9
    assert likeness[False] < 0.6


@pytest.mark.slow
def test_fedfa_by_changes_moves_the_way_it_would_without_the_boost(tmp_path: Path) -> None:
    """Boosting one client's change alters the mean norm, but no direction."""
    likeness = {}
    weights = FedFA(norm="l2", class_mask=False)
    for method in (weights, replace(weights, scaled="changes")):
        context = make_context(method)
        state, size = draw_state(context.network), len(context.space) - 1
        other_clients = [DrawnClient(name=f"other{index}", size=size, scale=0.01) for index in range(3)]
        # Changes are drawn by name, so that both are the same change with different scales.
        plain, boosted = (
            play(
                context, state, [*other_clients, DrawnClient(name="boosted", size=size, scale=scale)], tmp_path
            ).state.shared
            for scale in (0.01, 2.0)
        )
        name = "stem.weight"
        moved, further = ((model[name] - state.shared[name]).flatten().double() for model in (plain, boosted))
        likeness[method.scaled] = float(torch.cosine_similarity(moved, further, dim=0))
    assert likeness["changes"] == pytest.approx(1, abs=1e-5)
    assert likeness["weights"] < 0.9


@pytest.mark.slow
def test_fedfa_by_changes_leaves_a_model_that_nobody_trained_as_it_is(tmp_path: Path) -> None:
    context = make_context(FedFA(scaled="changes", norm="l2"))
    state = draw_state(context.network)
    clients = [replace(client, scale=0.0) for client in list_clients(context)]
    assert have_same_bits(play(context, state, clients, tmp_path).state.shared, state.shared)
