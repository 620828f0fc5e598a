"""A module as pure functions that can be traced: one step of training, evaluation and inference."""

from subfleet.export.steps.forward import evaluation_step, inference_step
from subfleet.export.steps.step import SampleSpec, Step, Student
from subfleet.export.steps.training import training_step

__all__ = ["SampleSpec", "Step", "Student", "evaluation_step", "inference_step", "training_step"]
