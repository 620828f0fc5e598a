"""The status of a method follows from its parameters and the run's setting."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from subfleet.elastic.robust_aggregation import CoordinateMedian
from subfleet.elastic.server_optimisers import ServerYogi as YogiStep
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods import METHODS, AnyMethod, describing
from subfleet.methods.adaptive import FedAdam, FedYogi
from subfleet.methods.anycostfl import AnycostFL
from subfleet.methods.describing import (
    Published,
    Setting,
    describe_status,
    join_departures,
    list_departures,
    list_parameters,
)
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.federated_dropout import FederatedDropout
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fedprox import FedProx
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.fedtrans import FedTrans
from subfleet.methods.fjord import FjORD
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.nefl import NeFL
from subfleet.methods.standalone import Standalone
from subfleet.methods.techniques import Techniques
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.update_codecs import Qsgd, TopK, Uncompressed
from subfleet.testing.rounds import MODEL, make_config, make_context

PUBLISHED = DynamicSelection(search="paper", distillation=DistillationSettings())


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (HeteroFL(), Setting()),
        (HeteroFL(), Setting(norm="batch", techniques=Techniques(norms="calibrated"))),
        (HeteroFL(), Setting(norm="none", scaler=True)),
        (FedAvg(), Setting()),
        (FedRolex(), Setting(norm="batch")),
        (FedFA(fidelity="paper", choice="declared"), Setting()),
    ],
)
def test_a_method_as_in_its_paper_is_exact(method: AnyMethod, setting: Setting) -> None:
    assert join_departures(list_departures(method, setting)) == "exact"


@pytest.mark.parametrize(
    ("method", "setting", "departure"),
    [
        (HeteroFL(depth=True), Setting(), "submodels also leave out blocks"),
        (HeteroFL(class_mask=False), Setting(), "outputs of classes that a client lacks"),
        (HeteroFL(weighting="samples"), Setting(), "by its samples"),
        (HeteroFL(), Setting(norm="batch"), "statistics are not measured again"),
        (HeteroFL(), Setting(norm="layer"), "model.scaler"),
        (FedAvg(model="nested"), Setting(), "largest submodel that fits"),
        (FedProx(), Setting(), "every client trains all epochs"),
        (FedAdam(), Setting(), "an update counts by its samples"),
        (FedAvg(weighting="uniform"), Setting(), "counts as 1"),
        (FedYogi(model="nested"), Setting(), "largest submodel that fits"),
        (FjORD(distillation_weight=0.5), Setting(), "labels count once"),
        (FjORD(self_distillation=False), Setting(norm="batch"), "shared by all widths"),
        (FedRolex(), Setting(), "roll together"),
        (FedRolex(weighting="samples"), Setting(norm="none"), "by its samples"),
        (FederatedDropout(), Setting(), "not compressed"),
        (AnycostFL(codec=None), Setting(), "not compressed"),
        (NeFL(), Setting(), "no learnable steps"),
        (FlexiFed(), Setting(), "the first budget"),
        (
            DynamicSelection(),
            Setting(),
            "the learning rate of distillation is not 1e-3; the search is a Pareto search, not the paper's",
        ),
        (DynamicSelection(distillation=None), Setting(), "nothing is distilled"),
        (FedFA(), Setting(), "the first budget"),
        (FedFA(choice="score", proposals=3), Setting(), "at most 3 candidates"),
        (FedFA(scaled="changes"), Setting(), "changes are scaled"),
        (FedFA(grafting=False), Setting(), "nothing is grafted"),
        (
            PUBLISHED,
            Setting(techniques=Techniques(distillation=DistillationSettings(iterations=0))),
            "nothing is distilled",
        ),
        (
            PUBLISHED,
            Setting(techniques=Techniques(distillation=DistillationSettings(mode="anchored"))),
            "the teacher is constant during distillation",
        ),
        (AnycostFL(), Setting(techniques=Techniques(update_codec=Uncompressed())), "not compressed"),
        (AnycostFL(), Setting(techniques=Techniques(update_codec=TopK())), "compressed equally"),
        (FederatedDropout(), Setting(techniques=Techniques(update_codec=Uncompressed())), "not compressed"),
        (FjORD(), Setting(techniques=Techniques(norms="bank")), "separate for each width"),
    ],
)
def test_a_departure_from_the_paper_is_described(method: AnyMethod, setting: Setting, departure: str) -> None:
    assert departure in join_departures(list_departures(method, setting))


@pytest.mark.parametrize(
    ("method", "setting", "never"),
    [
        (NeFL(), Setting(learnable_steps=True), "steps"),
        (PUBLISHED, Setting(), "search"),
        (PUBLISHED, Setting(), "teacher"),
        (FlexiFed(choice="declared"), Setting(), "budget"),
        (FedFA(choice="declared"), Setting(), "architectures"),
        (FederatedDropout(), Setting(techniques=Techniques(update_codec=Qsgd())), "compressed"),
        (FjORD(), Setting(), "labels"),
        (
            DynamicSelection(),
            Setting(techniques=Techniques(distillation=DistillationSettings())),
            "learning rate of distillation",
        ),
        (
            DynamicSelection(),
            Setting(techniques=Techniques(distillation=DistillationSettings())),
            "teacher is constant",
        ),
        (PUBLISHED, Setting(techniques=Techniques(distillation=DistillationSettings(iterations=0))), "learning rate"),
    ],
)
def test_a_setting_as_in_the_paper_is_no_departure(method: AnyMethod, setting: Setting, never: str) -> None:
    assert never not in join_departures(list_departures(method, setting))


@pytest.mark.parametrize(
    ("method", "replaced", "departure"),
    [
        (
            FedAvg(),
            {"robust_aggregation": CoordinateMedian()},
            "updates are aggregated by coordinate_median in place of the mean (robust_aggregation)",
        ),
        (FedAvg(), {"server_optimiser": YogiStep()}, "the server's optimiser is fedyogi (server_optimiser)"),
        (FedAdam(), {"server_optimiser": YogiStep()}, "the server's optimiser is fedyogi (server_optimiser)"),
        (FedAvg(), {"update_codec": TopK()}, "updates are compressed by top_k (update_codec)"),
        (FedAvg(), {"norms": "bank"}, "norms are separate for each submodel (norms)"),
        (HeteroFL(), {"distillation": DistillationSettings()}, "the whole model teaches its submodels (distillation)"),
        (FedYogi(), {"server_optimiser": YogiStep(tau=0.1)}, "exact"),
        (FedAvg(), {"update_codec": Uncompressed()}, "exact"),
        (FedAvg(), {"distillation": DistillationSettings(iterations=0)}, "exact"),
        (FedAvg(), {"model": replace(MODEL, norm="none"), "norms": "bank"}, "exact"),
    ],
)
def test_a_run_is_exact_only_where_it_replaces_nothing(
    method: AnyMethod, replaced: dict[str, Any], departure: str
) -> None:
    status = describe_status(method, make_config(method, **replaced).setting)
    own = list_departures(method, Setting())
    assert status == join_departures((*own, *([] if departure == "exact" else [departure])))


def test_everything_that_a_run_replaces_is_reported_once() -> None:
    replaced: dict[str, Any] = {
        "robust_aggregation": CoordinateMedian(),
        "server_optimiser": YogiStep(),
        "distillation": DistillationSettings(),
    }
    status = describe_status(FedAvg(), make_config(FedAvg(), **replaced).setting)
    assert [words.rpartition("(")[2] for words in status.split("; ")] == [
        "robust_aggregation)",
        "server_optimiser)",
        "distillation)",
    ]


def test_what_a_method_describes_itself_is_not_reported_twice() -> None:
    cases: tuple[tuple[AnyMethod, Setting], ...] = (
        (NeFL(), Setting(techniques=Techniques(norms="bank"))),
        (Standalone(), Setting(techniques=Techniques(norms="bank"))),
        (FederatedDropout(), Setting(techniques=Techniques(update_codec=Qsgd()))),
        (DynamicSelection(), Setting(techniques=Techniques(distillation=DistillationSettings()))),
    )
    for method, setting in cases:
        assert describe_status(method, setting) == join_departures(list_departures(method, setting))


def test_a_configuration_gives_its_setting() -> None:
    assert make_config(HeteroFL()).setting == Setting()
    model = replace(MODEL, norm="batch", learnable_steps=True, scaler=True)
    setting = make_config(HeteroFL(), model, norms="recalibrated", update_codec=Qsgd()).setting
    assert setting == Setting(
        norm="batch",
        learnable_steps=True,
        scaler=True,
        techniques=Techniques(norms="recalibrated", update_codec=Qsgd()),
    )


def test_defaults_are_those_of_the_papers_where_these_work() -> None:
    """HeteroFL's code cuts widths alone, counts every client as 1 and masks the classes that a client lacks."""
    assert HeteroFL() == HeteroFL(weighting="uniform", class_mask=True, depth=False)
    context = make_context(HeteroFL())
    assert {len(size.blocks) for size in context.space} == {len(context.network.blocks)}
    assert context.training(1).objective.class_mask


def _other_values(kind: type[AnyMethod], name: str, published: Any) -> list[Any]:
    """Return values of a parameter that differ from the paper's: the rest of a closed set, or a nearby number."""
    *path, last = name.split(".")
    owner: Any = kind
    for part in path:
        owner = get_type_hints(owner)[part]
    hint = get_type_hints(owner)[last]
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if value != published]
    if isinstance(published, bool):
        return [not published]
    if isinstance(published, int):
        return [published + 1]
    if isinstance(published, float):
        return [published * 0.9 or 0.25]
    if isinstance(published, tuple):
        return [published[:-1] or (0.5,)]
    return []


def _replace_nested(method: Any, name: str, value: Any) -> Any:
    first, _, rest = name.partition(".")
    return replace(method, **{first: _replace_nested(getattr(method, first), rest, value) if rest else value})


PARAMETERS = [
    (name, path, published)
    for name, kind in METHODS.items()
    for path, published in list_parameters(kind).items()
    if published is not None
]


_OORT = ("exploration", "exploration_decay", "least_exploration", "percentile", "pacer_step", "steep")
OPEN: dict[str, tuple[str, ...]] = {
    "anycostfl": ("steps",),
    "dynamic_selection": ("rates", "estimates"),
    "fedadam": ("server.learning_rate", "server.tau"),
    "fedfa": ("central", "proposals"),
    "fedoras": (
        *("supernet_rounds", "tiers", "search.evolution.evaluations", "search.evolution.population"),
        *("search.evolution.offspring", "search.evolution.mutation", "search.evolution.target"),
        *("search.scoring", "search.scoring_clients", "search.scoring_rounds"),
    ),
    "fedprox": ("mu",),
    "fedtrans": ("left_behind", "delta", "smoothing", "decay"),
    "fedyogi": ("server.learning_rate", "server.tau"),
    "fjord": ("temperature",),
    "flexifed": ("sharing",),
    "fluid": ("stragglers", "agreeing", "growing_from", "increment"),
    "oort": _OORT,
    "power_of_choice": ("candidates",),
    "pyramidfl": (*(f"oort.{name}" for name in _OORT), "least_left_out", "most_left_out", "idle"),
    "sattler": ("mean_norm", "max_norm", "warmup_rounds", "least_clients"),
    "standalone": ("choice",),
}
"""The parameters that the papers leave open."""


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_states_what_the_paper_has_unless_the_paper_leaves_it_open(name: str) -> None:
    paths = list_parameters(METHODS[name])
    assert {path for path, published in paths.items() if published is None} == set(OPEN.get(name, ()))
    for path in paths:
        attrgetter(path)(METHODS[name]())  # it exists


@pytest.mark.parametrize(
    ("name", "path", "entry"),
    PARAMETERS,
    ids=lambda entry: entry if isinstance(entry, str) else "",
)
def test_a_parameter_that_is_not_as_in_the_paper_is_a_departure(name: str, path: str, entry: Published) -> None:
    """This holds for the default and for all other values, except those that the table also gives to the paper."""
    default = METHODS[name]()
    value = attrgetter(path)(default)
    if value != entry.value and entry.matters(default):
        assert _is_departure(default, path, value, entry), f"{path} = {value!r} is no departure from {entry.value!r}"
    for other in _other_values(METHODS[name], path, entry.value):
        if isinstance(entry.otherwise, Mapping) and other not in entry.otherwise:
            assert (name, path, other) in STILL_THE_PAPERS
            continue
        assert _is_departure(default, path, other, entry), f"{path} = {other!r} is no departure from {entry.value!r}"


STILL_THE_PAPERS = {
    *((name, "model", "smallest") for name in METHODS),  # one model for all, too
    *((name, "oort.model", "smallest") for name in METHODS),
    ("fedoras", "min_contributors", 3),  # no client's update is seen alone
}


def _is_departure(method: AnyMethod, path: str, value: Any, entry: Published) -> bool:
    """Whether a value of a parameter adds a departure that the paper's value does not have."""
    departing = set(list_departures(_replace_nested(method, path, value), Setting()))
    try:
        published = set(list_departures(_replace_nested(method, path, entry.value), Setting()))
    except (ConfigError, TypeError, ValueError):
        published = set()  # no value of the parameter does as the paper says
    return bool(departing - published)


def test_a_parameter_without_a_described_departure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above fails for a departure without a description."""
    alpha = Published(value=0.9)
    assert _is_departure(FedTrans(), "alpha", 0.5, alpha)
    silent = {**list_parameters(FedTrans), "alpha": None}
    monkeypatch.setattr(describing, "list_parameters", lambda kind: silent)
    assert not _is_departure(FedTrans(), "alpha", 0.5, alpha)
