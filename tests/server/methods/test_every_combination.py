"""Every method with every policy of norms, codec, robust rule and server optimiser that a configuration accepts."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import pytest
import torch
from matrices import mostly_long
from server.aggregating import aggregate_clients
from server.methods.method_cases import QUICK

from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Family
from subfleet.elastic.robust_aggregation import (
    ROBUST_AGGREGATIONS,
    AnyRobustAggregation,
    CoordinateMedian,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from subfleet.elastic.server_optimisers import SERVER_OPTIMISERS, AnyServerOptimiser, ServerMomentum
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods import AnyMethod
from subfleet.methods.aggregator import Participant, keep_aggregate
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fjord import FjORD
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.nefl import NeFL
from subfleet.methods.standalone import Standalone
from subfleet.methods.techniques import NormPolicy
from subfleet.protocol.training import ObjectiveSettings, TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec
from subfleet.rounds.context import RunContext
from subfleet.rounds.state import ClientState
from subfleet.testing.rounds import (
    DrawnClient,
    compute_logits,
    draw_state,
    find_held,
    make_config,
    make_context,
    store_update,
    view_model,
    with_steps,
)
from subfleet.testing.submodels import have_same_bits
from subfleet.transport.blob_store import BlobStore

MODEL = Mlp(input_shape=(3,), class_count=4, widths=(8,), depths=(2,), group_size=2, norm="batch")
GROUPS = replace(MODEL, norm="group")
NORMS: tuple[NormPolicy, ...] = get_args(NormPolicy)
CODECS: tuple[AnyUpdateCodec, ...] = tuple(kind() for kind in get_args(AnyUpdateCodec))
RULES: tuple[AnyRobustAggregation | None, ...] = (
    None,
    NormClipping(max_norm=0.5),
    CoordinateMedian(),
    TrimmedMean(),
    MultiKrum(),
)
OPTIMISERS = (None, *(kind() for kind in SERVER_OPTIMISERS.values()))
PERSONAL = ("clustered", "standalone", "flexifed")
"""Methods with which no server optimiser is accepted."""
REFUSED: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("fjord", "calibrated"): "devices measure norms of kind 'batch'",
        ("dynamic_selection", "bank"): "norms = 'bank' keeps separate norms for each size",
    }
)
"""Why a policy of norms does not go with a method."""
SQUARES = ObjectiveSettings(name="mean_squared_error")
TAUGHT = DistillationSettings()
CLIENTS = (
    DrawnClient(name="ada", size=0, samples=3, classes=(2, 1, 0, 0)),
    DrawnClient(name="bob", size=0, samples=5, classes=(1, 0, 4, 0)),
    DrawnClient(name="cyd", size=1, samples=9, classes=(1, 4, 4, 0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A combination that a configuration accepts, and the updates that its clients have stored."""

    name: str
    context: RunContext
    blobs: BlobStore
    clients: tuple[DrawnClient, ...]
    quiet: tuple[ClientState, ...]
    loud: tuple[ClientState, ...]

    def aggregate(self, state: ModelState, clients: tuple[ClientState, ...], **roles: Any) -> ModelState:
        context = replace(self.context, roles=with_steps(self.context.roles, **roles)) if roles else self.context
        result = aggregate_clients(context, self.blobs, state, 1, clients, context.roles.memory.initial)
        assert not result.refused, self.name
        return result.state


def refusal(method: AnyMethod, model: Family, **settings: Any) -> str:
    """Why a configuration refuses a combination; empty where it does not."""
    try:
        make_config(method, model, **settings)
    except ValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The settings of a combination, beside its method."""

    norms: NormPolicy
    codec: AnyUpdateCodec
    robust: AnyRobustAggregation | None
    optimiser: AnyServerOptimiser | None

    @property
    def name(self) -> str:
        rule = "mean" if self.robust is None else self.robust.TYPE
        return f"{self.norms} {self.codec.TYPE} {rule} {'' if self.optimiser is None else self.optimiser.TYPE}"


def pairs() -> list[Choice]:
    """Return choices with any two of norms, codec and robust rule at least once, and most server optimisers."""
    return [
        Choice(
            norms=norms,
            codec=CODECS[(row + column) % len(CODECS)],
            robust=robust,
            optimiser=OPTIMISERS[(row + 2 * column) % len(OPTIMISERS)],
        )
        for (row, norms), (column, robust) in itertools.product(enumerate(NORMS), enumerate(RULES))
    ]


def triples() -> list[Choice]:
    """Return every combination of norms, codec and robust rule; server optimisers take turns."""
    every = zip(itertools.product(NORMS, CODECS, RULES), itertools.cycle(OPTIMISERS), strict=False)
    return [
        Choice(norms=norms, codec=codec, robust=robust, optimiser=optimiser)
        for (norms, codec, robust), optimiser in every
    ]


def cases(name: str, choices: Iterable[Choice], folder: Path) -> Iterator[Case]:
    """Yield the accepted combinations; the others are refused with the expected message."""
    method, model, blobs = QUICK[name], GROUPS if name == "fjord" else MODEL, BlobStore(folder)
    plans: dict[NormPolicy, RunContext] = {}
    stored: dict[str, tuple[tuple[DrawnClient, ...], tuple[ClientState, ...], tuple[ClientState, ...]]] = {}
    for choice in choices:
        optimiser = None if name in PERSONAL else choice.optimiser
        settings = {
            "norms": choice.norms,
            "update_codec": choice.codec,
            "robust_aggregation": choice.robust,
            "server_optimiser": optimiser,
        }
        expected = REFUSED.get((name, choice.norms), "")
        message = refusal(method, model, **settings)
        assert expected in message
        assert bool(expected) == bool(message)
        if message:
            continue
        if choice.norms not in plans:
            plans[choice.norms] = make_context(method, model, norms=choice.norms)
        context = replace(plans[choice.norms], config=make_config(method, model, **settings))
        if choice.codec.TYPE not in stored:
            most = len(context.space) - 1
            clients = tuple(replace(client, codec=choice.codec, size=min(client.size, most)) for client in CLIENTS)
            quiet = tuple(store_update(context, replace(client, scale=0.0), blobs) for client in clients)
            stored[choice.codec.TYPE] = (
                clients,
                quiet,
                tuple(store_update(context, client, blobs) for client in clients),
            )
        clients, quiet, loud = stored[choice.codec.TYPE]
        yield Case(name=choice.name, context=context, blobs=blobs, clients=clients, quiet=quiet, loud=loud)


def check(case: Case) -> None:
    """Check a round in which every client learned, and one in which none did."""
    state = draw_state(case.context.network)
    aggregated = case.aggregate(state, case.loud, after_round=keep_aggregate, distillation=None)
    check_what_moved(case, state, aggregated)
    # Clients have copies now that differ from the shared tensors. Momentum alone would change the model.
    start = replace(aggregated, moments={})
    still = case.aggregate(start, case.quiet, after_round=keep_aggregate, distillation=None)
    sorts = case.context.roles.aggregator.after_round is not keep_aggregate
    after = case.aggregate(start, case.quiet, distillation=None) if sorts else still
    for client in case.clients:
        before = view_model(case.context, aggregated, client)
        assert have_same_bits(before, view_model(case.context, still, client)), case.name
        if sorts:
            if case.context.roles.assigner.exchange is not None:  # a client sees its own network alone
                assert have_same_bits(before, view_model(case.context, after, client)), case.name
                continue
            logits = compute_logits(case.context, view_model(case.context, after, client))
            assert logits == pytest.approx(compute_logits(case.context, before), rel=1e-4, abs=1e-4), case.name


def check_what_moved(case: Case, state: ModelState, aggregated: ModelState) -> None:
    """Check that each client's model changed, and only where clients that share the tensor hold elements."""
    keys = {client.name: find_sharing_keys(case, aggregated, client) for client in case.clients}
    held = {client.name: find_held(case.context, [client]) for client in case.clients}
    for client in case.clients:
        before, after = view_model(case.context, state, client), view_model(case.context, aggregated, client)
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        assert moved, case.name
        for name in moved:
            if isinstance(case.context.config.method, FedFA) and case.context.network.tensors[name].part is not None:
                continue  # grafting also moves the blocks that clients lack
            key = keys[client.name].get(name)
            together = [held[other.name][name] for other in case.clients if keys[other.name].get(name) == key]
            free = ~torch.stack(together).any(dim=0)
            assert torch.equal(before[name][free], after[name][free]), (case.name, name)


def find_sharing_keys(case: Case, state: ModelState, client: DrawnClient) -> Mapping[str, str]:
    size = case.context.space[client.size]
    participant = Participant(client_id=client.name, architecture=size, size=size)
    return case.context.roles.aggregator.sharing_groups(case.context.network, participant, state.sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", mostly_long(QUICK, "heterofl", "flexifed", "standalone", "nefl", "fluid", "dynamic_selection")
)
def test_learning_rate_0_and_what_nobody_held_change_nothing_that_anybody_sees(name: str, tmp_path: Path) -> None:
    accepted = 0
    for case in cases(name, pairs(), tmp_path):
        check(case)
        accepted += 1
    refused = [norms for method, norms in REFUSED if method == name]
    assert accepted == (len(NORMS) - len(refused)) * len(RULES)
    assert {type(rule) for rule in RULES if rule is not None} == set(ROBUST_AGGREGATIONS.values())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_so_it_is_with_every_three_of_them(name: str, tmp_path: Path) -> None:
    for case in cases(name, triples(), tmp_path):
        check(case)


@pytest.mark.parametrize("robust", [rule for rule in RULES if rule is not None], ids=lambda rule: rule.TYPE)
def test_no_robust_rule_moves_rows_of_classes_that_nobody_holds(robust: AnyRobustAggregation, tmp_path: Path) -> None:
    context = make_context(QUICK["heterofl"], MODEL, robust_aggregation=robust, server_optimiser=ServerMomentum())
    blobs, state = BlobStore(tmp_path), draw_state(context.network)
    clients = [store_update(context, client, blobs) for client in CLIENTS]
    aggregated = aggregate_clients(context, blobs, state, 1, clients, context.roles.memory.initial).state
    for name in ("head.weight", "head.bias"):
        assert torch.equal(aggregated.shared[name][3], state.shared[name][3])
        assert not aggregated.moments["mean"][name][3].any()
        assert not torch.equal(aggregated.shared[name][0], state.shared[name][0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": FjORD(), "model": MODEL}, "set model.norm = 'group', or method.self_distillation = false"),
        ({"method": FjORD(), "training": TrainingSettings(objective=SQUARES)}, "has no classes"),
        ({"training": TrainingSettings(objective=ObjectiveSettings(distillation="self"))}, "type = 'fjord'"),
        ({"method": NeFL(), "distillation": TAUGHT}, "method 'nefl' keeps separate tensors for clients or sizes"),
        ({"method": Standalone(), "distillation": TAUGHT}, "set distillation.iterations = 0"),
        ({"norms": "bank", "distillation": TAUGHT}, "set distillation.iterations = 0, or norms = 'averaged'"),
        ({"method": FlexiFed(), "server_optimiser": ServerMomentum()}, "leave server_optimiser out"),
        (
            {"method": Standalone(), "robust_aggregation": CoordinateMedian(otherwise="stay")},
            "set robust_aggregation.otherwise = 'mean'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_remedy(settings: dict[str, Any], message: str) -> None:
    text = refusal(**{"method": HeteroFL(), "model": GROUPS, **settings})
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "settings",
    [
        {"method": FjORD(self_distillation=False), "model": MODEL},
        {"method": HeteroFL(), "training": TrainingSettings(objective=SQUARES)},
        {"method": DynamicSelection(), "norms": "bank", "distillation": DistillationSettings(iterations=0)},
        {"method": Standalone(), "robust_aggregation": CoordinateMedian()},
    ],
)
def test_the_remedies_work(settings: dict[str, Any]) -> None:
    assert not refusal(**{"model": GROUPS, **settings})
