import math
import re
from typing import Any

import pytest

from subfleet.protocol.schema import canonical_json, from_plain
from subfleet.protocol.training import AugmentationSettings, ObjectiveSettings, OptimiserSettings, TrainingSettings


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (TrainingSettings, {"learning_rate": math.nan}, "learning_rate is nan, but must be a finite number, 0 or more"),
        (TrainingSettings, {"proximal_mu": math.inf}, "proximal_mu is inf, but must be a finite number, 0 or more"),
        (TrainingSettings, {"proximal_mu": 0.1}, "the objective has no proximal term; set objective.proximal"),
        (TrainingSettings, {"distillation_weight": 0.1}, "no distillation term; set objective.distillation"),
        (TrainingSettings, {"micro_batch_size": 17}, "micro_batch_size is 17, but must be 0 to batch_size 16"),
        (
            OptimiserSettings,
            {"momentum": math.nan},
            "momentum is nan, but must be a finite number, at least 0 and below 1",
        ),
        (OptimiserSettings, {"weight_decay": math.nan}, "weight_decay is nan, but must be a finite number, 0 or more"),
        (OptimiserSettings, {"epsilon": 0.0}, "epsilon is 0.0, but must be above 0, below"),
        (OptimiserSettings, {"nesterov": True, "dampening": 0.1}, "nesterov needs momentum above 0 and dampening 0"),
        (ObjectiveSettings, {"temperature": math.inf}, "temperature is inf, but must be a finite number, above 0"),
        (ObjectiveSettings, {"name": "mean_squared_error", "class_mask": True}, "has no classes"),
        (ObjectiveSettings, {"name": "hinge"}, r"name is 'hinge', but must be one of \['cross_entropy', 'next_token'"),
        (OptimiserSettings, {"name": "lion"}, r"name is 'lion', but must be one of \['sgd', 'adam', 'adamw'\]"),
        (AugmentationSettings, {"name": "crop"}, "padding is 0, but must be 1 or more with augmentation 'crop'"),
        (AugmentationSettings, {"name": "crop_and_flip", "padding": -1}, "padding is -1, but must be 0 or more"),
        (AugmentationSettings, {"name": "flip", "padding": 2}, "augmentation 'flip' has no padding; omit it"),
        (AugmentationSettings, {"padding": 2}, "augmentation 'none' has no padding; omit it"),
        (
            TrainingSettings,
            {"objective": ObjectiveSettings(distillation="self"), "distillation_weight": 1.5},
            "must be at most 1 with distillation 'self'",
        ),
    ],
)
def test_invalid_and_contradictory_settings_are_refused(kind: Any, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**fields)


def test_a_program_takes_micro_batches_if_they_are_set() -> None:
    assert TrainingSettings(batch_size=8).program_batch_size == 8
    assert TrainingSettings(batch_size=8, micro_batch_size=3).program_batch_size == 3
    mutual = ObjectiveSettings(distillation="mutual")
    assert TrainingSettings(objective=mutual, distillation_weight=1.5).distillation_weight == 1.5


@pytest.mark.parametrize(
    ("name", "padding", "shape", "problem"),
    [
        ("none", 0, (80,), None),
        ("flip", 0, (3, 4, 5), None),
        ("crop", 3, (3, 4, 5), None),
        ("flip", 0, (80,), r"'flip' needs images of shape .*, but samples have shape \(80,\)"),
        ("crop", 4, (3, 4, 5), "pads images of 4 x 5 by 4, but must pad by less than their sides"),
        ("crop_and_flip", 4, (3, 5, 4), "pads images of 5 x 4 by 4"),
    ],
)
def test_only_images_that_are_larger_than_the_border_can_be_augmented(
    name: Any, padding: int, shape: tuple[int, ...], problem: str | None
) -> None:
    message = AugmentationSettings(name=name, padding=padding).problem_with(shape)
    assert message is None if problem is None else re.search(problem, message or "")


def test_a_task_without_augmentation_is_what_older_devices_know() -> None:
    assert b"augmentation" not in canonical_json(TrainingSettings())
    augmented = TrainingSettings(augmentation=AugmentationSettings(name="crop", padding=4))
    assert b'"augmentation":{"name":"crop","padding":4}' in canonical_json(augmented)
    assert from_plain(TrainingSettings, {"augmentation": {"name": "crop", "padding": 4}}) == augmented
