"""What a method says of itself follows from its parameters and the run's setting."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subfleet.elastic.merges import CoordinateMedian
from subfleet.elastic.server_optimisers import FedYogi as YogiStep
from subfleet.elastic.teaching import DistillationSettings
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.anycostfl import AnycostFL
from subfleet.methods.describing import Setting, status_of
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.fedadam import FedAdam
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.federated_dropout import FederatedDropout
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fedprox import FedProx
from subfleet.methods.fedrolex import FedRolex
from subfleet.methods.fedyogi import FedYogi
from subfleet.methods.fjord import FjORD
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.judging import method_status
from subfleet.methods.nefl import NeFL
from subfleet.methods.standalone import Standalone
from subfleet.protocol.update_codecs import Qsgd, TopK, Uncompressed
from subfleet.testing.rounds import MODEL, config_with, terms_with

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = DynamicSelection(search="paper", distillation=DistillationSettings())


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (HeteroFL(), Setting()),
        (HeteroFL(), Setting(norm="batch", norms="calibrated")),
        (HeteroFL(), Setting(norm="none", scaler=True)),
        (FedAvg(), Setting()),
        (FedProx(), Setting()),
        (FedAdam(), Setting()),
        (FedYogi(), Setting()),
        (FedRolex(), Setting(norm="batch")),
        (FedFA(fidelity="paper", choice="declared"), Setting()),
    ],
)
def test_what_does_as_its_paper_says_is_exact(method: AnyMethod, setting: Setting) -> None:
    assert status_of(method.departures(setting)) == "exact"


@pytest.mark.parametrize(
    ("method", "setting", "told"),
    [
        (HeteroFL(depth=True), Setting(), "subnets leave out blocks too"),
        (HeteroFL(class_mask=False), Setting(), "outputs of classes that a client lacks"),
        (HeteroFL(weighting="samples"), Setting(), "by its samples"),
        (HeteroFL(), Setting(norm="batch"), "statistics are not measured anew"),
        (HeteroFL(), Setting(norm="layer"), "model.scaler"),
        (FedAvg(model="nested"), Setting(), "largest subnet that fits"),
        (FedAvg(weighting="uniform"), Setting(), "counts as 1"),
        (FedYogi(model="nested"), Setting(), "largest subnet that fits"),
        (FjORD(distillation_weight=0.5), Setting(), "labels count once"),
        (FjORD(self_distillation=False), Setting(norm="batch"), "all widths together"),
        (FedRolex(), Setting(), "roll together"),
        (FedRolex(weighting="samples"), Setting(norm="none"), "by its samples"),
        (FederatedDropout(), Setting(), "not compressed"),
        (AnycostFL(codec=None), Setting(), "not compressed"),
        (NeFL(), Setting(), "no learnable steps"),
        (FlexiFed(), Setting(), "the first budget"),
        (DynamicSelection(), Setting(), "the search is ours; the teacher stays as it was"),
        (DynamicSelection(distillation=None), Setting(), "nothing is distilled"),
        (FedFA(), Setting(), "the first budget"),
        (FedFA(choice="score", proposals=3), Setting(), "at most 3 sizes"),
        (FedFA(scaled="changes"), Setting(), "changes are scaled"),
        (FedFA(grafting=False), Setting(), "nothing is grafted"),
        (PUBLISHED, Setting(distillation=DistillationSettings(iterations=0)), "nothing is distilled"),
        (PUBLISHED, Setting(distillation=DistillationSettings(mode="anchored")), "the teacher stays as it was"),
        (AnycostFL(), Setting(update_codec=Uncompressed()), "not compressed"),
        (AnycostFL(), Setting(update_codec=TopK()), "compressed alike"),
        (FederatedDropout(), Setting(update_codec=Uncompressed()), "not compressed"),
        (FjORD(), Setting(norms="bank"), "each width's own"),
    ],
)
def test_what_departs_from_its_paper_says_so(method: AnyMethod, setting: Setting, told: str) -> None:
    assert told in status_of(method.departures(setting))


@pytest.mark.parametrize(
    ("method", "setting", "never"),
    [
        (NeFL(), Setting(learnable_steps=True), "steps"),
        (PUBLISHED, Setting(), "search"),
        (PUBLISHED, Setting(), "teacher"),
        (FlexiFed(choice="declared"), Setting(), "budget"),
        (FedFA(choice="declared"), Setting(), "architectures"),
        (FederatedDropout(), Setting(update_codec=Qsgd()), "compressed"),
        (FjORD(), Setting(), "labels"),
        (DynamicSelection(), Setting(distillation=DistillationSettings()), "taught with another"),
        (DynamicSelection(), Setting(distillation=DistillationSettings()), "teacher stays"),
        (PUBLISHED, Setting(distillation=DistillationSettings(iterations=0)), "learning rate"),
    ],
)
def test_what_does_not_depart_there_says_nothing_of_it(method: AnyMethod, setting: Setting, never: str) -> None:
    assert never not in status_of(method.departures(setting))


@pytest.mark.parametrize(
    ("method", "replaced", "told"),
    [
        (
            FedAvg(),
            {"merge": CoordinateMedian()},
            "updates are merged by coordinate_median in place of the mean (merge)",
        ),
        (FedAvg(), {"server_optimiser": YogiStep()}, "the server's optimiser is fedyogi (server_optimiser)"),
        (FedAdam(), {"server_optimiser": YogiStep()}, "the server's optimiser is fedyogi (server_optimiser)"),
        (FedAvg(), {"update_codec": TopK()}, "updates are compressed by top_k (update_codec)"),
        (FedAvg(), {"norms": "bank"}, "norms are kept per size (norms)"),
        (HeteroFL(), {"distillation": DistillationSettings()}, "the whole model teaches its subnets (distillation)"),
        (FedYogi(), {"server_optimiser": YogiStep(tau=0.1)}, "exact"),
        (FedAvg(), {"update_codec": Uncompressed()}, "exact"),
        (FedAvg(), {"distillation": DistillationSettings(iterations=0)}, "exact"),
        (FedAvg(), {"model": replace(MODEL, norm="none"), "norms": "bank"}, "exact"),
    ],
)
def test_a_run_is_exact_only_where_it_replaces_nothing(method: AnyMethod, replaced: dict[str, Any], told: str) -> None:
    said = method_status(method, config_with(method, **replaced).setting)
    assert said.endswith(told)
    assert "; " not in said


def test_everything_that_a_run_replaces_is_told_once() -> None:
    replaced: dict[str, Any] = {
        "merge": CoordinateMedian(),
        "server_optimiser": YogiStep(),
        "distillation": DistillationSettings(),
    }
    told = method_status(FedAvg(), config_with(FedAvg(), **replaced).setting)
    assert [words.rpartition("(")[2] for words in told.split("; ")] == ["merge)", "server_optimiser)", "distillation)"]


def test_what_a_method_judges_itself_is_not_told_twice() -> None:
    cases: tuple[tuple[AnyMethod, Setting], ...] = (
        (NeFL(), Setting(norms="bank")),
        (Standalone(), Setting(norms="bank")),
        (FederatedDropout(), Setting(update_codec=Qsgd())),
        (DynamicSelection(), Setting(distillation=DistillationSettings())),
    )
    for method, setting in cases:
        assert method_status(method, setting) == status_of(method.departures(setting))


def test_a_configuration_tells_its_setting() -> None:
    assert config_with(HeteroFL()).setting == Setting()
    model = replace(MODEL, norm="batch", learnable_steps=True, scaler=True)
    told = config_with(HeteroFL(), model, norms="recalibrated", update_codec=Qsgd()).setting
    assert told == Setting(norm="batch", learnable_steps=True, scaler=True, norms="recalibrated", update_codec=Qsgd())


def test_defaults_are_those_of_the_papers_where_these_work() -> None:
    """HeteroFL's code cuts widths alone, counts every client as 1 and masks the classes that a client lacks."""
    assert HeteroFL() == HeteroFL(weighting="uniform", class_mask=True, depth=False)
    terms = terms_with(HeteroFL())
    assert {len(size.blocks) for size in terms.space} == {len(terms.network.blocks)}
    assert terms.training(1).objective.class_mask


def test_the_page_tells_the_status_of_every_method_by_default() -> None:
    page = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8").partition("## Where they differ")[2]
    page = page.partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", page, re.MULTILINE))
    assert rows == {name: status_of(kind().departures(Setting())) for name, kind in METHODS.items()}
