"""Which settings fit each kind of task, checked when a run's file is read; and scores of devices without a bound."""

from dataclasses import replace
from typing import Any

import pytest

from subfleet.elastic.families.records.choices import ChoiceCnn
from subfleet.elastic.families.records.plain import Fcn
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.families.records.transformers import Decoder
from subfleet.elastic.network import Family
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.fedtrans import FedTrans
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.power_of_choice import PowerOfChoice
from subfleet.methods.standalone import Standalone
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.task_kinds import TASK_KINDS
from subfleet.protocol.training import ObjectiveSettings, TrainingSettings
from subfleet.settings.fleet import Backdoor, DeviceSettings, FleetSettings
from subfleet.settings.reading import list_included_runs, read_run
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings, PartitionSettings

MLP = Mlp(input_shape=(1, 8, 8), class_count=3, widths=(4,), depths=(1,), group_size=2)
FCN = Fcn(input_shape=(1, 8, 8), class_count=3, widths=(4,), depths=(1,))
DECODER = Decoder(input_shape=(15,), class_count=8, widths=(8,), depths=(1,), heads=(1,), vocabulary=8)
MODELS: dict[str, tuple[Family, ...]] = {
    "cross_entropy": (MLP,),
    "next_token": (DECODER,),
    "dense_cross_entropy": (FCN,),
    "binary_cross_entropy": (MLP, FCN, DECODER),
    "mean_squared_error": (MLP, FCN, DECODER),
}
ONE = replace(MLP, class_count=1)


def run_of(model: Family, objective: str, **changes: Any) -> Run:
    training = TrainingSettings(objective=ObjectiveSettings(name=objective))  # type: ignore[arg-type]
    usual: dict[str, Any] = {"data": DataSettings(test="test.npz"), "method": HeteroFL(class_mask=False)}
    return Run(name="r", model=model, training=training, **{**usual, **changes})


@pytest.mark.parametrize("objective", TASK_KINDS)
def test_each_kind_fits_families_with_outputs_of_its_labels(objective: str) -> None:
    for model in (MLP, FCN, DECODER):
        if model in MODELS[objective]:
            assert run_of(model, objective).label_shape is not None
        else:
            with pytest.raises(ValueError, match=f"training.objective.name is '{objective}', which needs a class"):
                run_of(model, objective)


def test_labels_have_the_shape_of_what_is_predicted() -> None:
    shapes = {
        (objective, model.TYPE): run_of(model, objective).label_shape
        for objective in MODELS
        for model in MODELS[objective]
    }
    assert shapes == {
        ("cross_entropy", "mlp"): (),
        ("next_token", "decoder"): (15,),
        ("dense_cross_entropy", "fcn"): (8, 8),
        **{(name, "mlp"): (3,) for name in ("binary_cross_entropy", "mean_squared_error")},
        **{(name, "fcn"): (8, 8, 3) for name in ("binary_cross_entropy", "mean_squared_error")},
        **{(name, "decoder"): (15, 8) for name in ("binary_cross_entropy", "mean_squared_error")},
    }


def emulation(partition: str, **device: Any) -> dict[str, Any]:
    devices = (DeviceSettings(id="a", profile="laptop", log="laptop", **device),)
    data = DataSettings(test="t.npz", train="t.npz", partition=PartitionSettings(name=partition))  # type: ignore[arg-type]
    return {"data": data, "fleet": FleetSettings(devices=devices), "min_clients": 1}


REFUSED: dict[str, tuple[Family, str, dict[str, Any], str]] = {
    "one class": (
        ONE,
        "cross_entropy",
        {},
        "model.class_count is 1, but with one class every prediction is correct; set 2 or more",
    ),
    "too many numbers": (
        replace(MLP, class_count=1025),
        "mean_squared_error",
        {},
        "supports at most 1024 outputs",
    ),
    "names": (
        MLP,
        "binary_cross_entropy",
        {"data": DataSettings(test="t", classes=("a", "b", "c"))},
        "has no classes; omit it",
    ),
    "some names": (
        MLP,
        "cross_entropy",
        {"data": DataSettings(test="t", classes=("a", "b"))},
        "names 2, but must name all 3",
    ),
    "8 bits": (MLP, "mean_squared_error", {"deploy_quantisation": "static"}, "evaluated by the class of each sample"),
    "8 bits of pixels": (
        FCN,
        "dense_cross_entropy",
        {"deploy_quantisation": "dynamic"},
        "set deploy_quantisation = 'none'",
    ),
    "in place": (
        MLP,
        "mean_squared_error",
        {"distillation": DistillationSettings()},
        "teaches submodels the classes that the whole model predicts.*set distillation.iterations = 0",
    ),
    "a gain of nothing": (MLP, "mean_squared_error", {"method": FedTrans()}, "set method.stop_rounds = 0"),
    "classes of several numbers": (MLP, "mean_squared_error", emulation("dirichlet"), "set 'iid' or 'natural'"),
    "classes of labels": (
        MLP,
        "binary_cross_entropy",
        emulation("shard"),
        "needs one class or number for each sample",
    ),
    "classes of pixels": (FCN, "dense_cross_entropy", emulation("pathological"), "set 'iid' or 'natural'"),
    "a backdoor": (MLP, "binary_cross_entropy", emulation("iid", attack=Backdoor()), "has no class for each sample"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused_with_one_error(name: str) -> None:
    model, objective, changes, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as caught:
        run_of(model, objective, **changes)
    assert "\n" not in str(caught.value)


TAUGHT = ObjectiveSettings(name="cross_entropy", label_smoothing=0.1)


@pytest.mark.parametrize("option", [{"label_smoothing": 0.1}, {"class_mask": True}, {"distillation": "mutual"}])
@pytest.mark.parametrize("name", ["binary_cross_entropy", "mean_squared_error"])
def test_settings_over_classes_need_classes(name: str, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no classes"):
        ObjectiveSettings(name=name, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [PowerOfChoice(), Standalone(), FedTrans(stop_rounds=0)])
@pytest.mark.parametrize("objective", TASK_KINDS)
def test_methods_defined_for_a_kind_fit_it(objective: str, method: Any) -> None:
    model = MODELS[objective][0]
    assert (
        run_of(model, objective, method=method, evaluation=read_run("power_of_choice").evaluation).label_shape
        is not None
    )


def test_one_number_is_partitioned_by_tenths_and_own_data_need_no_partition() -> None:
    run_of(ONE, "mean_squared_error", **emulation("dirichlet"))
    run_of(MLP, "binary_cross_entropy", **emulation("dirichlet", data="own.npz"))


def test_devices_score_paths_only_if_their_scores_are_bounded() -> None:
    text = ["data.partition={name='iid'}", "training.objective.name=mean_squared_error"]
    assert isinstance(read_run("fedoras", text).method, FedorAS)
    assert isinstance(read_run("fedoras", text).model, ChoiceCnn)
    with pytest.raises(ConfigError, match=r"no bound, so one device's scores could decide; set method.search.scoring"):
        read_run("fedoras", [*text, "method.search.scoring=devices", "model.norm=group"])
    read_run(
        "fedoras",
        [text[0], "training.objective.name=binary_cross_entropy", "method.search.scoring=devices", "model.norm=group"],
    )


def test_there_is_a_shipped_run_of_every_kind() -> None:
    names = ("classification", "sequence", "segmentation", "multi-label", "regression", "regression-several")
    assert set(names) <= set(list_included_runs())
    kinds = [read_run(name).training.objective.kind.name for name in names]
    assert kinds == ["classification", "sequence", "segmentation", "multi_label", "regression", "regression"]
    assert {device.runtime for device in read_run("regression").fleet.devices} == {"onnx", "executorch", "torch"}
