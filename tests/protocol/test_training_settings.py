import math
from typing import Any

import pytest

from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings, TrainingSettings


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (TrainingSettings, {"learning_rate": math.nan}, "learning_rate is nan, but must be a number of 0 or more"),
        (TrainingSettings, {"proximal_mu": math.inf}, "proximal_mu is inf, but must be a number of 0 or more"),
        (TrainingSettings, {"proximal_mu": 0.1}, "the objective has no proximal term; set objective.proximal"),
        (TrainingSettings, {"distillation_weight": 0.1}, "no distillation term; set objective.distillation"),
        (TrainingSettings, {"micro_batch_size": 17}, "micro_batch_size is 17, but must be 0 to batch_size 16"),
        (OptimiserSettings, {"momentum": math.nan}, "momentum is nan, but must be at least 0 and below 1"),
        (OptimiserSettings, {"weight_decay": math.nan}, "weight_decay is nan, but must be a number of 0 or more"),
        (OptimiserSettings, {"epsilon": 0.0}, "epsilon is 0.0, but must be a number above 0"),
        (OptimiserSettings, {"nesterov": True, "dampening": 0.1}, "nesterov needs momentum and no dampening"),
        (ObjectiveSettings, {"temperature": math.inf}, "temperature is inf, but must be a number above 0"),
        (ObjectiveSettings, {"name": "mean_squared_error", "class_mask": True}, "knows no classes"),
        (
            TrainingSettings,
            {"objective": ObjectiveSettings(distillation="self"), "distillation_weight": 1.5},
            "must be at most 1 with distillation 'self'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(kind: Any, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**fields)


def test_a_program_takes_micro_batches_where_there_are_some() -> None:
    assert TrainingSettings(batch_size=8).program_batch_size == 8
    assert TrainingSettings(batch_size=8, micro_batch_size=3).program_batch_size == 3
    mutual = ObjectiveSettings(distillation="mutual")
    assert TrainingSettings(objective=mutual, distillation_weight=1.5).distillation_weight == 1.5
