"""Classes belong to the run: devices declare theirs by name, and a device with unknown names gets no task."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from server.coordinator_cases import CLIENTS, context_of, measuring, prepared, profile, task, telemetry
from server.fake_device import CLASSES, SHAPE
from server.server_rig import World, config, evaluation, fleet

from subfleet.aggregation.evaluation_data import read_evaluation_data
from subfleet.elastic.building import network_of
from subfleet.export.requests import InferRequest
from subfleet.methods.heterofl import HeteroFL, mask_classes
from subfleet.protocol.errors import ConfigError, DataError
from subfleet.protocol.messages import Profile
from subfleet.protocol.training import ObjectiveSettings, TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.offers import count_classes
from subfleet.rounds.state import ClientState, RunState
from subfleet.settings.reading import read_run
from subfleet.settings.samples import DataSettings
from subfleet.tasks import Dataset, write_npz

NAMES = ("ant", "bee", "dog")


def name_classes(classes: tuple[str, ...], test: str = "server.server_rig:evaluation") -> DataSettings:
    return DataSettings(test=test, classes=classes)


RUN = config(data=name_classes(NAMES))


def client_of(context: RunContext, declared: Profile) -> tuple[RunState, ClientState]:
    """The run and the client with this profile, after telemetry."""
    state = measuring(context)
    state, _ = step(context, state, declared, 1.5)
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name), 2.0)
    return state, state.clients[declared.client_id]


def with_classes(*names: str, counts: tuple[int, ...] | None = None) -> Profile:
    return replace(profile("ada"), class_names=names, class_counts=counts or (5,) * len(names))


def test_the_test_run_has_as_many_classes_as_names() -> None:
    assert len(NAMES) == CLASSES == RUN.model.class_count


def test_counts_by_name_are_put_into_the_runs_order() -> None:
    assert count_classes(RUN, with_classes("dog", "bee", counts=(7, 2))) == ((0, 2, 7), "")
    assert count_classes(config(), with_classes("2", "0", counts=(7, 2))) == ((2, 0, 7), "")
    assert count_classes(RUN, profile("ada")) == ((1,) * CLASSES, "")


@pytest.mark.parametrize(
    ("classes", "declared", "words"),
    [
        (NAMES, with_classes("ant", "cow"), "the run has no class 'cow': its classes are 'ant', 'bee', 'dog'"),
        ((), with_classes("cat", "dog"), "the run has no class 'cat', 'dog': its classes are the numbers 0 to 2"),
        ((), with_classes("2", "3"), "the run has no class '3'"),
        ((), replace(profile("ada"), class_counts=(1,) * 4), "its data have 4 classes, but the model has 3"),
        (
            (),
            replace(profile("ada"), class_counts=()),
            "its labels are floating point numbers, but the run's labels are classes",
        ),
    ],
)
def test_a_device_with_other_classes_is_skipped_with_the_reason(
    classes: tuple[str, ...], declared: Profile, words: str
) -> None:
    _, client = client_of(context_of(data=name_classes(classes)), declared)
    assert (client.stage, client.task) == ("skipped", None)
    assert words in client.reason


def test_a_device_with_some_of_the_classes_is_told_all_names_in_its_task() -> None:
    context = context_of(data=name_classes(NAMES))
    state, client = client_of(context, with_classes("dog"))
    assert (client.stage, client.offer.class_counts) == ("preparing", (0, 0, 5))
    state, _ = step(context, state, prepared(context, state, "ada"), 2.0)
    assert task(state, "ada").classes == NAMES


def test_masks_are_made_of_the_classes_that_a_device_names() -> None:
    context = context_of(data=name_classes(NAMES), method=HeteroFL())
    _, client = client_of(context, with_classes("dog", "bee", counts=(7, 2)))
    assert client.participant is not None
    (bias,) = (
        mask for name, mask in mask_classes(context.network, client.participant).items()
        if network_of(context.config.model).tensors[name].shape == (CLASSES,)
    )  # fmt: skip
    assert np.asarray(bias).tolist() == [0, 1, 1]


def test_gray_and_coloured_pictures_are_the_same_samples() -> None:
    context = context_of()
    coloured = replace(profile("ada"), input_shape=(3, *SHAPE))
    assert "its samples have shape" in client_of(context, coloured)[1].reason
    assert client_of(context, replace(coloured, other_input_shapes=(SHAPE,)))[1].stage == "preparing"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ("ant",)}, "classes names 1, but must name all 3 of the model"),
        ({"classes": ("ant", "ant", "b")}, "has 'ant' twice"),
        (
            {"classes": NAMES, "training": TrainingSettings(objective=ObjectiveSettings(name="mean_squared_error"))},
            "classes is set, but objective 'mean_squared_error' has no classes",
        ),
    ],
)
def test_classes_that_a_run_cannot_have_are_refused(changes: dict[str, Any], words: str) -> None:
    settings = {name: value for name, value in changes.items() if name != "classes"}
    with pytest.raises(ValueError, match=words):
        config(data=name_classes(changes["classes"]), **settings)


def test_a_runs_file_names_its_classes(tmp_path: Path) -> None:
    text = (
        'name = "r"\ndata.test = "d"\ndata.classes = ["no", "yes"]\n'
        '[model]\nfamily = "mlp"\ninput_shape = [4]\nclass_count = 2\nwidths = [4]\ndepths = [1]\n'
    )
    (tmp_path / "run.toml").write_text(text)
    assert read_run(tmp_path / "run.toml").data.classes == ("no", "yes")
    (tmp_path / "run.toml").write_text(text.replace('"no", ', ""))
    with pytest.raises(ConfigError, match="classes names 1"):
        read_run(tmp_path / "run.toml")


def images(folder: Path, *names: str) -> str:
    """One picture of 3 x 2 for each class: as many values as the run's network takes."""
    for index, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        Image.new("L", (3, 2), index).save(folder / name / "1.png")
    return str(folder)


def read_images(folder: Path, *names: str, classes: tuple[str, ...] = ()) -> Any:
    settings, dataset, _ = read_evaluation_data(config(data=name_classes(classes, images(folder, *names))))
    return settings, dataset


@pytest.mark.slow
def test_a_run_without_names_has_those_of_its_evaluation_folder(tmp_path: Path) -> None:
    settings, dataset = read_images(tmp_path / "a", "9", "10", "2")
    assert settings.data.classes == dataset.class_names == ("2", "9", "10")
    assert dataset.labels.tolist() == [0, 1, 2]
    renamed, _ = read_images(tmp_path / "b", "9", "11", "2")
    assert settings.fingerprint() != replace(renamed, data=replace(renamed.data, test=settings.data.test)).fingerprint()


@pytest.mark.parametrize(("test_samples", "taken"), [(0, 30), (7, 7), (99, 30)])
def test_the_first_evaluation_samples_are_taken(test_samples: int, taken: int) -> None:
    settings = config(data=replace(name_classes(NAMES), test_samples=test_samples))
    _, dataset, _ = read_evaluation_data(settings)
    np.testing.assert_array_equal(dataset.labels, evaluation()[1][:taken])


def test_an_evaluation_folder_is_mapped_to_the_names_of_the_run(tmp_path: Path) -> None:
    settings, dataset = read_images(tmp_path / "a", "bee", "ant", classes=("dog", "bee", "ant"))
    assert settings.data.classes == ("dog", "bee", "ant")
    assert sorted(zip(dataset.labels.tolist(), dataset.inputs[:, 0] > 0, strict=True)) == [(1, False), (2, True)]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0, 3]), r"data.test: a label of .* is 3, but must be below 3"),
        (np.array([0.0, 1.0], np.float32), "data.test: labels of .* are floating point numbers"),
    ],
)
def test_evaluation_labels_that_are_no_classes_are_refused_before_the_run(
    tmp_path: Path, labels: Any, words: str
) -> None:
    write_npz(tmp_path / "test.npz", Dataset(inputs=np.zeros((2, *SHAPE), np.float32), labels=labels))
    with pytest.raises(DataError, match=words):
        World(tmp_path, config(data=DataSettings(test=str(tmp_path / "test.npz"))), fleet())


def test_evaluation_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.test: .* names 2 classes, but the model has 3; name all of them"):
        read_images(tmp_path / "a", "ant", "bee")
    with pytest.raises(DataError, match=r"data.test: the classes of .* do not fit: the run has no class 'cow'"):
        read_images(tmp_path / "b", "ant", "cow", classes=NAMES)


@pytest.mark.slow
def test_a_run_keeps_its_names_and_gives_them_to_tasks_and_models(tmp_path: Path) -> None:
    data = images(tmp_path / "data", *NAMES)
    world = World(tmp_path, config(data=name_classes((), data), rounds=1), fleet())
    world.run()
    tasks = [task for device in world.devices.values() for task in device.tasks]
    assert {task.classes for task in tasks} == {NAMES}
    assert {request.classes for request in world.exports.requests if isinstance(request, InferRequest)} == {NAMES}
    (tmp_path / "data" / "dog").rename(tmp_path / "data" / "elk")
    with pytest.raises(ConfigError, match=r"have changed since it was started: data\.classes"):
        World(tmp_path, config(data=name_classes((), data), rounds=1), fleet())
