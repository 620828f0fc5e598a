"""A module as pure functions that can be traced: one step of training, evaluation, and inference."""

from subfleet.export.steps.evaluation import evaluation_step
from subfleet.export.steps.inference import inference_step
from subfleet.export.steps.training import training_step
from subfleet.export.steps.values import SampleSpec, Step, Student

__all__ = ["SampleSpec", "Step", "Student", "evaluation_step", "inference_step", "training_step"]
