"""Several networks in a run: ids without collisions, retirement, and aggregates of each network."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from server.coordinator_cases import CLIENTS, refusal, training
from server.coordinator_cases import context_of as context_with_settings
from server.server_rig import MODEL

from subfleet.aggregation.aggregation import apply_evolution
from subfleet.aggregation.views import Views
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.lineage import Copied, Drawn, Lineage, Replicated
from subfleet.elastic.model_state import ModelState, pack_state, unpack_state
from subfleet.elastic.replication import Replication, size_in
from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.methods.aggregator import Participant
from subfleet.methods.assigner import open_stream
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.run_networks import Evolution, EvolutionContext, StandingContext
from subfleet.protocol.errors import ConfigError, InvalidError
from subfleet.protocol.readings import Budget
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import (
    build_target_estimates,
    estimate_size,
    find_standing,
    get_estimates,
    list_candidates,
    list_lineages,
    list_living_lineages,
    list_networks,
    replace_lineages,
    request_estimates,
)
from subfleet.rounds.obstacles import list_unfit_sizes, record_unfit
from subfleet.rounds.state import RunState, Submodel
from subfleet.rounds.work import CostRequest
from subfleet.search.queue import ProgramFacts, SizedProgram, WrittenProgram
from subfleet.serving.narration import describe_networks
from subfleet.testing.rounds import MODEL as CONFIG
from subfleet.testing.rounds import draw_state, make_context, with_steps
from subfleet.testing.submodels import have_same_bits

plan = cache(partial(make_context, HeteroFL()))
WIDER = replace(CONFIG, widths=(12, 16), depths=(3, 3))
FIRST = Lineage(id="", config=CONFIG)
COPY = Lineage(id="a", config=CONFIG, parent="", map=Copied(), born_round=1)

ids = st.sampled_from(["", "a", "b", "c1", "c11"])
architectures = st.builds(
    Architecture,
    axes=st.sampled_from([(), (("stream", Prefix(size=4)),), (("stream", Prefix(size=8)),)]),
    blocks=st.sampled_from([(), ("a",), ("a", "b")]),
    network=ids,
)


def wider_lineage(network_id: str = "wide") -> Lineage:
    """A wider and deeper network that computes the same function as the first."""
    wider, first = network_of(WIDER), network_of(CONFIG)
    drawn = Replication.draw(wider, size_in(wider, first), open_stream("tests"))
    sources = tuple(sorted(drawn.sources.items()))
    return Lineage(id=network_id, config=WIDER, parent="", map=Replicated(sources=sources), born_round=1)


def evolution_context(before: ModelState, **changes: Any) -> EvolutionContext:
    settings: dict[str, Any] = {
        "round": 1,
        "seed": 3,
        "lineages": (FIRST,),
        "networks": {"": plan().network},
        "before": before,
        "after": before,
        "clients": (),
        "losses": {},
        "carried_by": lambda lineage: (),
        "aggregated_with": lambda network_id, names: before,
    }
    return EvolutionContext(**{**settings, **changes})


def grow_network(lineage: Lineage, state: ModelState) -> tuple[ModelState, tuple[Lineage, ...]]:
    return apply_evolution(plan(), evolution_context(state), Evolution(after=state, born=(lineage,)))


# --- ids ----------------------------------------------------------------------------------------------------------


@given(left=architectures, right=architectures, student=st.none() | architectures)
def test_the_id_of_a_submodel_depends_on_its_network(
    left: Architecture, right: Architecture, student: Architecture | None
) -> None:
    same = left == right
    assert (left.architecture_id == right.architecture_id) == same
    keys = [SizedProgram(size=size, target="onnx", student=student).key for size in (left, right)]
    assert (keys[0] == keys[1]) == same
    for network in ("", "a"):
        lineage = replace(COPY, id=network, parent=None, map=Drawn()) if network else None
        assert (CostRequest(target="onnx", lineage=lineage).key == "onnx") == (not network)


def test_the_ids_of_a_run_with_one_network_are_stable() -> None:
    """As they are in existing journals and caches."""
    assert Architecture().architecture_id == "5ae1625b488b3935"
    assert Architecture(axes=(("stream", Prefix(size=4)),), blocks=("a",)).architecture_id == "c759946ca39eaad5"
    assert b"network" not in canonical_json(Architecture())


def test_a_submodel_of_one_network_is_none_of_another() -> None:
    other = plan().get_declared(COPY)
    for architecture in plan().space:
        with pytest.raises(ConfigError, match="a submodel belongs to network '', but was used with network 'a'"):
            other.network.shapes(architecture)
    assert [size.network for size in other.space] == ["a"] * len(plan().space)
    assert [replace(size, network="", name="") for size in other.space] == [replace(a, name="") for a in plan().space]
    assert all(size.name.startswith("a ") for size in other.space)


def test_submodels_of_two_networks_have_two_keys(tmp_path: Path) -> None:
    state, _ = grow_network(COPY, draw_state(plan().network))
    views = Views(context=plan(), samples=torch.zeros(1, 5))
    keys = set()
    for network_id in ("", "a"):
        size = replace(plan().get_declared(COPY if network_id else None).space[0], name="the same")
        keys.add(views.of(state, Participant(client_id="ada", architecture=size, size=size)).key)
    assert len(keys) == 2


def test_an_id_that_is_no_name_of_a_file_is_refused() -> None:
    for invalid_id in ("../up", "a/b", "x" * 65):
        with pytest.raises(InvalidError, match=r"id is .*, but must be empty, or 1 to 64 letters"):
            Lineage(id=invalid_id, config=CONFIG)
    with pytest.raises(ValueError, match="has no parent"):
        Lineage(id="a", config=CONFIG, map=Copied())
    with pytest.raises(ValueError, match="was retired in round 1, but appeared in round 2"):
        replace(COPY, born_round=2, retired_round=1)


# --- first weights ----------------------------------------------------------------------------------------------------


def test_a_copy_has_the_bits_of_its_parent_and_memory_of_its_own() -> None:
    before = draw_state(plan().network)
    state, lineages = grow_network(COPY, before)
    assert lineages == (FIRST, COPY)
    child = state.of("a")
    assert have_same_bits(child.shared, before.shared)
    assert child.lineage == COPY
    child.shared["stem.weight"].zero_()
    assert before.shared["stem.weight"].any()


@pytest.mark.slow
def test_a_wider_and_deeper_network_computes_what_its_parent_does() -> None:
    before = draw_state(plan().network)
    state, lineages = grow_network(wider_lineage(), before)
    inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    outputs = []
    for lineage in lineages:
        network = plan().get_declared(lineage).network
        module = build_module(network, network.full_architecture())
        module.load_state_dict(dict(state.of(lineage.id).shared))
        outputs.append(module.eval()(inputs).detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    largest = list_networks(plan(), RunState(lineages=lineages))[1].space[-1]
    assert estimate_size(plan(), lineages, largest).parameters > plan().first.candidates[-1].parameters


def test_a_drawn_network_begins_like_a_run_of_its_own() -> None:
    alone = Lineage(id="new", config=WIDER, born_round=1)
    state, _ = grow_network(alone, draw_state(plan().network))
    assert have_same_bits(state.of("new").shared, init_state(network_of(WIDER), 3))


MISTAKES: dict[str, tuple[Callable[[ModelState], Evolution], str]] = {
    "an id twice": (lambda state: Evolution(after=state, born=(COPY, COPY)), r"networks \['a', 'a'\] appear"),
    "the first's id": (lambda state: Evolution(after=state, born=(FIRST,)), "appear, but each needs a new id"),
    "no such parent": (
        lambda state: Evolution(after=state, born=(replace(COPY, parent="z"),)),
        "'a' grows from 'z', which is not in use",
    ),
    "other classes": (
        lambda state: Evolution(after=state, born=(replace(COPY, config=replace(CONFIG, class_count=9)),)),
        "9 classes, but the run's networks have",
    ),
    "another round": (lambda state: Evolution(after=state, born=(replace(COPY, born_round=7),)), "after round 1, but"),
    "unknown": (
        lambda state: Evolution(after=state, retired=("z",)),
        r"networks \['z'\] retire, but only \[''\] are in use",
    ),
    "none is left": (lambda state: Evolution(after=state, retired=("",)), "all networks retire"),
    "weights of another": (
        lambda state: Evolution(after=state, born=(COPY,), states={"a": ModelState(shared={"x": torch.zeros(1)})}),
        "the first weights of network 'a' do not fit its settings",
    ),
    "networks in the model": (
        lambda state: Evolution(after=state.with_network("q", ModelState(shared=state.shared))),
        "other networks than the round",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_a_method_is_an_error(name: str) -> None:
    answer, message = MISTAKES[name]
    state = draw_state(plan().network)
    with pytest.raises(ValueError, match=message):
        apply_evolution(plan(), evolution_context(state), answer(state))


def test_a_search_over_one_network_is_refused_with_changing_networks() -> None:
    def keep_networks(inputs: EvolutionContext) -> Evolution:
        return Evolution(after=inputs.after)

    with pytest.raises(ValueError, match="`evolve` changes networks, but `search` knows only the first one"):
        with_steps(DynamicSelection().roles(), evolve=keep_networks)


def test_settings_that_a_map_does_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="has other settings than its parent"):
        grow_network(replace(COPY, config=WIDER), draw_state(plan().network))


# --- checkpoints and the journal --------------------------------------------------------------------------------------


@pytest.mark.parametrize("retired", [(), ("",), ("a",)])
def test_a_model_of_several_networks_survives_a_checkpoint(retired: tuple[str, ...]) -> None:
    before = draw_state(plan().network)
    answer = Evolution(after=before, born=(COPY, wider_lineage()))
    state, lineages = apply_evolution(plan(), evolution_context(before), answer)
    networks = {lineage.id: plan().get_declared(lineage).network for lineage in lineages}
    later = evolution_context(state, round=2, lineages=lineages, networks=networks)
    state, lineages = apply_evolution(plan(), later, Evolution(after=state, retired=retired))
    child = state.of("wide")
    copies = {"ada": {"stem.weight": child.shared["stem.weight"] + 1}}
    memory = {"a/b.c": torch.arange(3), "x": torch.zeros(())}
    state = state.with_network("wide", replace(child, copies=copies, moments={"mean": dict(child.shared)}, kept=memory))
    loaded = unpack_state(pack_state(state))
    assert loaded.network_ids == state.network_ids == tuple(lineage.id for lineage in lineages if lineage.living)
    for network_id in state.network_ids:
        read, own = loaded.of(network_id), state.of(network_id)
        assert have_same_bits(read.shared, own.shared)
        assert read.lineage == own.lineage
        assert {key: have_same_bits(read.copies[key], own.copies[key]) for key in own.copies} == dict.fromkeys(
            own.copies, True
        )
        assert read.moments.keys() == own.moments.keys()
        assert read.kept.keys() == own.kept.keys()
        assert all(torch.equal(read.kept[name], tensor) for name, tensor in own.kept.items())
    for network_id in retired:
        with pytest.raises(ConfigError, match="it has retired or never existed"):
            loaded.of(network_id)
        assert not any(network_id and name.startswith(f"network/{network_id}/") for name in pack_state(state))


def retire_network(context: RunContext) -> tuple[RunState, RunState]:
    """A run before and after its network `a` retires; every table of the run has entries of it before."""
    state = training(context)
    lineages = (*list_lineages(context, ()), COPY, replace(COPY, id="b"))
    state = replace(state, lineages=lineages)
    sizes = {lineage.id: context.get_declared(lineage).space[0] for lineage in lineages}
    programs = {network_id: SizedProgram(size=size, target="onnx") for network_id, size in sizes.items()}
    facts = ProgramFacts(planned_peak_bytes=1000)
    client = state.clients["ada"]
    for size in sizes.values():
        answer = replace(refusal(context, state, "ada"), reason="runtime")
        state = record_unfit(state, replace(client, given=Submodel(size=size, architecture=size)), answer, "no")
    last = {
        name: replace(client, client_id=name, given=Submodel(size=size, architecture=size))
        for name, size in zip(CLIENTS, sizes.values(), strict=True)
    }
    state = replace(
        state,
        written={item.key: WrittenProgram(program=item, facts=facts, run_attempt=1) for item in programs.values()},
        queue=tuple(programs.values()),
        last=last,
    )
    after = replace_lineages(
        context, state, tuple(replace(entry, retired_round=2) if entry.id == "a" else entry for entry in lineages)
    )
    return state, after


def test_a_retired_network_is_forgotten() -> None:
    context = context_with_settings(method=HeteroFL())
    before, after = retire_network(context)
    assert [lineage.id for lineage in list_living_lineages(context, after)] == ["", "b"]
    for known in (after.written, after.queue, list_unfit_sizes(after, "ada", "onnx")):
        assert len(known) == 2
    assert {written.program.size.network for written in after.written.values()} == {"", "b"}
    assert {program.size.network for program in after.queue} == {"", "b"}
    assert list_unfit_sizes(before, "ada", "onnx").keys() - list_unfit_sizes(after, "ada", "onnx").keys() == {
        context.get_declared(COPY).space[0].architecture_id
    }


def test_the_journal_keeps_networks_and_prunes_the_programs_of_those_that_retire(tmp_path: Path) -> None:
    context = context_with_settings(method=HeteroFL())
    before, after = retire_network(context)
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2))
    journal.save(RunState(), before)
    loaded = journal.load(9.0)
    assert (loaded.lineages, loaded.written, loaded.queue) == (before.lineages, before.written, before.queue)
    journal.save(before, after)
    loaded = journal.load(9.0)
    assert (loaded.lineages, loaded.written, loaded.queue) == (after.lineages, after.written, after.queue)
    engine.dispose()


# --- assignment ---------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_all_networks_in_use_each_with_its_own_estimate() -> None:
    context = context_with_settings(method=HeteroFL())
    state = RunState(lineages=(*list_lineages(context, ()), replace(COPY, config=MODEL)))
    both = list_candidates(context, state, "onnx")
    assert len(both) == 2 * len(context.space)
    assert [entry.order for entry in both] == sorted(entry.order for entry in both)
    estimate = get_estimates(context, state, "onnx")
    assert all(estimate(entry.architecture) == replace(entry, architecture=entry.architecture) for entry in both)
    alone = replace(
        state, lineages=tuple(replace(entry, retired_round=1) if not entry.id else entry for entry in state.lineages)
    )
    assert {candidate.architecture.network for candidate in list_candidates(context, alone, "onnx")} == {"a"}


def test_estimates_are_asked_for_of_each_network() -> None:
    context = context_with_settings(method=DynamicSelection())
    state = RunState(lineages=(*list_lineages(context, ()), replace(COPY, config=MODEL)))
    requests = request_estimates(context, state, "onnx")
    assert [request.key for request in requests] == ["onnx", "a/onnx"]
    known = {request.key: build_target_estimates(context, request, None, "no") for request in requests}
    assert request_estimates(context, replace(state, live=replace(state.live, estimates=known)), "onnx") == ()
    assert [candidate.architecture.network for candidate in known["a/onnx"].candidates] == ["a"] * len(context.space)


def test_a_client_of_a_retired_network_has_its_stand_in_or_is_left_out() -> None:
    context = context_with_settings(method=HeteroFL())
    _, after = retire_network(context)

    def find_stand_in(standing: StandingContext) -> Architecture:
        architecture = standing.client.architecture
        return architecture if architecture.network in standing.networks else replace(architecture, network="b")

    changed_roles = with_steps(context.roles, standing=find_stand_in)
    for roles, expected in ((context.roles, None), (changed_roles, "b")):
        changed = replace(context, roles=roles)
        retired = find_standing(changed, after, after.last["bob"])
        assert (None if retired is None else retired.architecture.network) == expected
        assert retired is None or retired.size == context.get_declared(after.lineages[2]).space[0]
        living = find_standing(changed, after, after.last["ada"])
        assert living is not None
        assert living.architecture.network == ""


def test_the_last_size_of_a_client_is_ready_and_written_sizes_from_the_next_round() -> None:
    context = context_with_settings(method=HeteroFL())
    _, after = retire_network(context)
    calls = list[StandingContext]()

    def find_stand_in(standing: StandingContext) -> Architecture:
        calls.append(standing)
        return standing.client.architecture

    changed = replace(context, roles=with_steps(context.roles, standing=find_stand_in))
    client = replace(
        after.last["ada"],
        offer=replace(after.last["ada"].offer, runtime="onnx", budget=Budget(memory_bytes=2**40)),
    )
    assert client.size is not None
    other = context.get_declared(after.lineages[2]).space[0]
    for number, nothing_written, expected in ((2, False, True), (1, False, False), (2, True, False)):
        state = replace(after, round=number, written={} if nothing_written else after.written)
        find_standing(changed, state, client)
        assert calls[-1].ready(replace(client.size, name="as it is called elsewhere"))
        assert calls[-1].ready(other) == expected


def test_people_are_told_of_networks() -> None:
    after = (replace(FIRST, retired_round=3), replace(COPY, born_round=3), Lineage(id="d", config=CONFIG, born_round=3))
    assert tuple(describe_networks((), after)) == (
        "the first network has retired",
        "network a has appeared, copied from the first network",
        "network d has appeared, drawn anew",
    )
    assert not list(describe_networks(after, after))
